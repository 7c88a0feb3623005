-- renew.lua: reset the expiry of a lease that its owner still holds.
--
-- KEYS[1]   lock
-- ARGV[1]   owner
-- ARGV[2]   ttl_ms    integer > 0, counted from now, not added
--
-- Returns   1 renewed   0 not held: nothing was created or revived
--
-- Many renewals are sent in one pipeline; each is a script of its own, so that the server can
-- serve others in between and a cluster can route it.

-- include: _lease

use(KEYS[1])
local lease = redis.call('HGET', lock, ARGV[1])
if not lease then return 0 end

local expires, token, acquired, rest = parse(lease)
if expires <= now then return 0 end  -- left there: the next token is to be higher than its

write(ARGV[1], now + ARGV[2], token, acquired, rest)
live_at_least(lock, tonumber(ARGV[2]))
return 1
