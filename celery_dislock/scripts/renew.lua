-- renew.lua: reset the expiry of a lease that its owner still holds.
--
-- KEYS[1]   lock
-- ARGV[1]   owner
-- ARGV[2]   ttl_ms    integer > 0, counted from now, not added
--
-- Returns   1 renewed   0 not held: nothing was created or revived
--
-- Touches the lock alone.  Many renewals are sent in one pipeline; each is a script of its own, so that
-- the server can serve others in between and a cluster can route it.

-- include: _lease

local lock = open(KEYS[1])
local lease = lease_of(lock, ARGV[1])
if not lease then return 0 end
if lease.expires <= now then return 0 end  -- left there: the next token must be higher than its

renew(lock, lease, tonumber(ARGV[2]))
return 1
