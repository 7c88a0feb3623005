-- put_back.lua: put a ticket that was set aside back in line, at the end.
--
-- KEYS[1]   lock
-- ARGV      broker   the caller's broker
--           ticket
--
-- Returns   {state, turns}   1 it is in line, or has its turn   0 it is not there any more
--                            2 nothing was changed: its record cannot be read   3 the same: it is in line, or runs
-- Touches all keys of its locks.  Sent twice, the second answers 0.  At each time the record is in one place, so
-- whatever becomes of its turns, the task is not lost.

-- include: _parked

local ticket
broker, ticket = unpack(ARGV)
local lock = open_whole(KEYS[1])
local record = redis.call('HGET', lock.name .. ASIDE, ticket)
if not record then return {0, turns} end
local parked = parse_ticket(record)
if not parked then return {2, turns} end
if redis.call('HEXISTS', lock.tickets, ticket) + redis.call('HEXISTS', lock.running, ticket) > 0 then return {3, turns} end
for nth = 2, #parked.stations do open_whole(parked.stations[nth].name) end
write_first(lock.name)
redis.call('HDEL', lock.name .. ASIDE, ticket)
parked.times = 0
arrive_anew(lock, ticket, parked)
recall_and_hand_off(lock)
return {1, turns}
