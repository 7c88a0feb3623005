-- find.lua: look for a task in one of the keys of a lock.
--
-- KEYS[1]   the whole name of a hash, or of a string
-- ARGV[1]   pattern   of the fields of a hash, as Redis matches them; empty: it is a string
-- ARGV[2]   cursor    of the fields; 0 for the first page
-- ARGV[3]   count     fields of a page, more or less
--
-- Returns   {cursor, field, head, ...}   fields that match, and the heads of their records; cursor 0: the last page
--           {'0', '', head}              of a string; head empty: there is none
-- Touches that key alone; changes nothing.

local HEAD_MOST = 1024  -- bytes
local pattern, cursor, count = unpack(ARGV)
if pattern == '' then return {'0', '', string.sub(redis.call('GET', KEYS[1]) or '', 1, HEAD_MOST)} end
local page = redis.call('HSCAN', KEYS[1], cursor, 'MATCH', pattern, 'COUNT', count)
local found = {page[1]}
for i = 1, #page[2], 2 do
  found[#found + 1], found[#found + 2] = page[2][i], string.sub(page[2][i + 1], 1, HEAD_MOST)
end
return found
