-- reserve.lua: reserve a key for a message that is about to be sent.
--
-- KEYS[1]   <lock>:unique   the whole name, so that it is found while a slot moves; see _unique.lua
-- ARGV[1]   id         of the message's task
-- ARGV[2]   ttl_ms     integer > 0: until it must be confirmed
-- ARGV[3]   replaces   1: the newest message counts   0: the first
-- ARGV[4]   nonce      of this call; the same if the command is sent again
-- ARGV[5]   result     1: it is stored   0: it is not
-- ARGV[6]   mark       ) of a message that is sent again, as a retry; left out: it is a new one
-- ARGV[7]   number     )
--
-- Touches that record alone
--
-- Returns   {0, id, state, result}       reserved for another
--           {1, burst_ms, mark, number}   reserved; since the first of the messages that replace each other
--
-- The older message is replaced when this one is confirmed, or has begun.  A message that is sent again
-- keeps its number, and never takes the key from another.

-- include: _unique

local key, id, ttl, replaces = KEYS[1], ARGV[1], tonumber(ARGV[2]), ARGV[3] == '1'
local nonce, again = ARGV[4], ARGV[6]

local it = unique_of(key) or new_unique(nonce)

local function reserved()
  return {1, now - it.first, it.mark, it.number}
end

-- A message of another life of the record replaces none: newest may be the number of one that is not sent.
local function number_again()
  return again == it.mark and tonumber(ARGV[7]) or it.newest > 0 and it.newest + 1 or 0
end

if is_reserved(it) then
  if it.nonce == nonce then return reserved() end
  if again and is_for(it, id, again, tonumber(ARGV[7])) then
    it.number = number_again()
    if it.state == 'r' then it.state = 's' end
    it.ends = math.max(it.ends, now + ttl)
    write_unique(key, it)
    return reserved()
  end
  if again or not replaces then return {0, it.id, it.state, it.result} end
  -- The message that is there may wait until its reservation ends, and must then be told.
  it.kept = math.max(it.kept, it.ends + COPY_MS)
end

if not (is_reserved(it) and WAITS[it.state]) then it.first = now end
if replaces and not again then
  it.newest = it.newest + 2
  it.number = it.newest
  it.kept = math.max(it.kept, now + ttl + COPY_MS)
else
  it.number = number_again()
end
it.state, it.ends, it.since = 's', now + ttl, now
it.id, it.nonce, it.result = id, nonce, ARGV[5]
write_unique(key, it)
return reserved()
