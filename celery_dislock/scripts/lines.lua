-- lines.lua: read a page of the locks that have parked tasks.
--
-- KEYS[1]   lines     see _index.lua
-- ARGV[1]   cursor    0 for the first page
-- ARGV[2]   count     of locks, more or less
--
-- Returns   {total, cursor, {lock, number, ...}}   cursor: of the next page; 0: this was the last
--                                                 number: empty if it may not be struck off yet
-- Touches that hash alone, and changes only how long it is kept.  A lock that is in it while all pages are read is on
-- at least one of them.

-- include: _index

local YOUNG_US = 60000000

redis.call('PEXPIRE', KEYS[1], KEPT_MS)
local page = redis.call('HSCAN', KEYS[1], ARGV[1], 'COUNT', ARGV[2])
local found = page[2]
for i = 2, #found, 2 do
  if now_us < (tonumber(found[i]) or 0) + YOUNG_US then found[i] = '' end
end
return {redis.call('HLEN', KEYS[1]), page[1], found}
