-- confirm.lua: keep a reservation, because its message has been sent or waits on.
--
-- KEYS[1]   lock
-- ARGV[1]   id       of the message's task
-- ARGV[2]   ttl_ms   integer > 0; an expiry that is later stays
-- ARGV[3]   runs     1: the task runs   0: its message waits, or was just sent
--
-- Touches   the reservation, and what it replaces
--
-- Returns   1 kept   0 it is not there, or another's, or the task has begun and the caller does not know

-- include: _record

local lock, id, ttl = KEYS[1], ARGV[1], tonumber(ARGV[2])

-- The usual case: a message was sent that replaces none.
local record = redis.call('GET', lock .. UNIQUE)
local since, its_id = string.match(record or '', '^1 s (%d+ %d+) (%S+) $')
if its_id == id and ARGV[3] == '0' then
  redis.call('SET', lock .. UNIQUE, table.concat({'1 w', since, id, ''}, ' '), 'PX',
    math.max(ttl, redis.call('PTTL', lock .. UNIQUE)))
  return 1
end

-- include: _unique

local there = unique_of(lock)
if not there or there.id ~= id or (there.state == 'r') ~= (ARGV[3] == '1') then return 0 end
tell_older(lock, there, ttl)
if there.state == 's' then there.state = 'w' end
write_unique(lock, there, math.max(ttl, redis.call('PTTL', lock .. UNIQUE)))
return 1
