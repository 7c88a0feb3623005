-- reserve.lua: reserve a key for a message that is about to be sent.
--
-- KEYS[1]   lock
-- ARGV[1]   id         of the message's task
-- ARGV[2]   ttl_ms     integer > 0: until it must be confirmed
-- ARGV[3]   replaces   1: the newest message counts   0: the first
--
-- Touches   the reservation, and what its id was replaced by before
--
-- Returns   {0, id, state}    reserved for another: w waits, r runs, s is being sent
--           {1, burst_ms}     reserved; since the first of the messages that replace each other
--
-- A message that this one replaces is told so by confirm.lua, when this one has been sent.  The same id
-- again keeps what it has: it is a retry, whose message is being sent if its task has run.

-- include: _record

local lock, id, ttl, replaces = KEYS[1], ARGV[1], tonumber(ARGV[2]), ARGV[3] == '1'

-- The usual case: the key is free, and the first message counts.
if not replaces and redis.call('EXISTS', lock .. UNIQUE, lock .. OLDER) == 0 then
  redis.call('SET', lock .. UNIQUE, table.concat({'1 s', now, now, id, ''}, ' '), 'PX', ttl)
  return {1, 0}
end

-- include: _unique

local there = unique_of(lock)
if there and there.id == id then
  if there.state == 'r' then
    there.state = 's'
    write_unique(lock, there, math.max(ttl, redis.call('PTTL', lock .. UNIQUE)))
  end
  return {1, math.max(0, now - there.first)}
end
local mine = {state = 's', since = now, first = now, id = id, older = ''}
if there and not replaces then return {0, there.id, there.state} end
if there and there.state ~= 'r' then
  mine.first = there.first
  local _, several = string.gsub(there.older, ',', ',')
  local ends = now + redis.call('PTTL', lock .. UNIQUE)
  local latest = string.format(',%s@%.0f', there.id, ends)
  mine.older = (several < OLDER_MOST and there.older or '') .. latest
end
redis.call('HDEL', lock .. OLDER, id)  -- an id that is used again is newer now
write_unique(lock, mine, ttl)
return {1, now - mine.first}
