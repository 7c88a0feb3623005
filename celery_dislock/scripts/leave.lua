-- leave.lua: take a parked task out of line, and give its turn on.
--
-- KEYS[1]   lock
-- ARGV      home      the caller's broker
--           ticket
--           aside     a message that cannot be read, to be kept for people to see; empty: nothing
--           over      1: no copy of it must run any more   0: it runs elsewhere, unless it was done here
--           goes_on   as for park.lua
--           task      as for park.lua: another task of its id is left where it is
--
-- Returns   {left, turns}   left: 1 it was there, waiting, running or replaced   0 it was not
--                                 2 it was done here, and over is 0: nothing was changed
-- Touches all keys of the lock.  Sent twice, the second answers 0.

-- include: _parked
-- include: _states

local ticket, aside, over, goes_on, task
home, ticket, aside, over, goes_on, task = unpack(ARGV)
over = over == '1'
local lock = open_whole(KEYS[1])
local record = redis.call('HGET', lock.tickets, ticket)
  or redis.call('HGET', lock.name .. REPLACED, ticket)
if record and not is_of(record, task) then return {NOT_THERE, turns} end
if not over and is_done(lock, ticket, goes_on) then return {RAN_HERE, turns} end

local was_there = forget(lock, ticket)
if redis.call('HDEL', lock.name .. REPLACED, ticket) == 1 then was_there = true end
if was_there and over then mark_done(lock, ticket, DONE_WITH_LOCK) end
if aside ~= '' then set_aside(lock, ticket, aside) end
recall_and_hand_off(lock)
return {was_there and LEFT or NOT_THERE, turns}
