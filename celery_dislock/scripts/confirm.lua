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
-- include: _unique

local lock, id, ttl = KEYS[1], ARGV[1], tonumber(ARGV[2])

local there = unique_of(lock)
if not there or there.id ~= id or (there.state == 'r') ~= (ARGV[3] == '1') then return 0 end
tell_older(lock, there, ttl)
if there.state == 's' then there.state = 'w' end
write_unique(lock, there, math.max(ttl, redis.call('PTTL', lock .. UNIQUE)))
return 1
