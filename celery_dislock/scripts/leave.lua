-- leave.lua: take a parked task out of line, and give its turn on.
--
-- KEYS[1]   lock
-- ARGV      home      the caller's broker
--           ticket
--           aside     a message that cannot be read, to be kept for people to see, unless the task is done
--                     empty: no copy of it must run any more
--           task      as for park.lua: another task of its id is left where it is
--
-- Returns   {left, turns}   left: 1 it was there, waiting, running or replaced   0 it was not
--
-- Touches all keys of the lock.  Sent twice, the second answers 0.

-- include: _parked

local ticket, aside, task
home, ticket, aside, task = unpack(ARGV)
local lock = open_whole(KEYS[1])
local record = redis.call('HGET', lock.tickets, ticket)
  or redis.call('HGET', lock.name .. REPLACED, ticket)
if record and not is_of(record, task) then return {0, turns} end
if aside ~= '' and is_done(lock, ticket, ANYBODY) then return {0, turns} end

local was_there = forget(lock, ticket)
if redis.call('HDEL', lock.name .. REPLACED, ticket) == 1 then was_there = true end
if was_there and aside == '' then mark_done(lock, ticket, DONE_WITH_LOCK) end
if aside ~= '' then set_aside(lock, ticket, aside) end
recall_and_hand_off(lock)
return {was_there and 1 or 0, turns}
