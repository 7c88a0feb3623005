-- leave.lua: take a parked task out of line, and give its turn on.
--
-- KEYS[1]   lock
-- ARGV[1]   home      the caller's broker
-- ARGV[2]   ticket
-- ARGV[3]   aside     a message that cannot be read, to be kept for people to see; empty: nothing
--
-- Returns   {left, turns}   left: 1 it was there, waiting, running or replaced   0 it was not
--                           turns: {lock, ticket, message, ...}, to be published
--
-- Sent twice, the second answers 0.

-- include: _lease
-- include: _parked

home = ARGV[1]
use_parked(KEYS[1])
count_leases()  -- before a reservation goes: the next token is to be higher than its
local left = forget(ARGV[2])
left = redis.call('HDEL', lock .. ':replaced', ARGV[2]) == 1 or left
if ARGV[3] ~= '' then set_aside(ARGV[2], ARGV[3]) end
if anyone_waits() then
  count_leases()
  pass_on()
end
return {left and 1 or 0, turns}
