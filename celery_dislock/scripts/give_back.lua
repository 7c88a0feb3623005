-- give_back.lua: put a parked task back in line whose message could not be published.
--
-- KEYS[1]   lock
-- ARGV[1]   ticket
--
-- Returns   1 it has its old place again   0 it did not have its turn any more
--
-- Gives nobody else the turn: whoever sweeps next does.  Sent twice, the second answers 0.

-- include: _lease
-- include: _parked

use_parked(KEYS[1])
line_exists()  -- or an error, before anything is done
local ticket = ARGV[1]
local joined, _, ttl, mode, limit, its_home, message =
  parse_ticket(redis.call('HGET', tickets, ticket) or '')
if not joined or redis.call('ZREM', handed, ticket) == 0 then return 0 end
redis.call('HDEL', lock, ticket .. '#')
write_ticket(ticket, joined, 0, ttl, mode, limit, its_home, message)
join(ticket, joined)
return 1
