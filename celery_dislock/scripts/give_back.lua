-- give_back.lua: put a parked task back in line whose message could not be published.
--
-- KEYS[1]   lock
-- ARGV[1]   ticket
--
-- Returns   1 it has its old place again   0 it did not have its turn any more
-- Touches the lock's line, and the tickets and turns of its parked tasks.  Gives nobody else the turn: the
-- next sweep does.  Sent twice, the second answers 0.

-- include: _parked

local ticket = ARGV[1]
local lock = open_whole(KEYS[1])
local parked, turn = read_ticket(lock, ticket), lease_of(lock, member_of(ticket))
if not parked or redis.call('ZREM', lock.handed, ticket) == 0 then return 0 end
if turn then drop(lock, turn) end
parked.times = 0
write_ticket(lock, ticket, parked)
join(lock, ticket, parked.joined)
return 1
