-- give_back.lua: put a parked task whose message could not be published back in line.
--
-- KEYS[1]   lock
-- ARGV[1]   ticket
--
-- Returns   1 the task has its old place again   0 it did not have its turn any more
-- Touches all keys of its locks.  Gives nobody else a turn: the next sweep does.  Sent twice, the second answers 0.

-- include: _parked

local ticket = ARGV[1]
local lock = open_whole(KEYS[1])
local parked = read_ticket(lock, ticket)
if not parked or redis.call('ZREM', lock.handed, ticket) == 0 then return 0 end
give_up(lock, ticket, parked.stations, 1)
parked.times = 0
write_ticket(lock, ticket, parked)
join(lock, member_of(ticket), parked.joined)
return 1
