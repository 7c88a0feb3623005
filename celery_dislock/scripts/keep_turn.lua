-- keep_turn.lua: keep a parked task's turn, as its message waits in a worker that will run it.
--
-- KEYS[1]   lock
-- ARGV[1]   ticket
--
-- Returns   1 the turn lasts as long as a first turn from now, or longer
--           0 it has no turn, or it is over: nothing was changed
-- Touches all keys of its locks.  What the ticket has passed is kept for as long, but no gate: others pass it at
-- rates, as a ticket whose turn was given again.

-- include: _parked

local ticket = ARGV[1]
local lock = open_whole(KEYS[1])
local ends = tonumber(redis.call('ZSCORE', lock.handed, ticket) or 0)
local parked = ends > now and read_ticket(lock, ticket)
if not (parked and has_all(lock, ticket, parked.stations)) then return 0 end
write_first(lock.name)
keep_turn(lock, ticket, parked, parked.ttl)
return 1
