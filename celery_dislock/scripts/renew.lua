-- renew.lua: reset the expiry of a lease that its owner still holds.
--
-- KEYS[1]   lock
-- ARGV[1]   owner
-- ARGV[2]   ttl_ms    integer > 0, counted from now, not added
--
-- Returns   1 renewed   0 not held: nothing was created or revived
--           a task's id: renewed, and this task, the newest of its key, waits for the lease to end; see _newest.lua
-- Touches the lock alone.  Each of many renewals is a script of its own, so that the server can serve others
-- in between and a cluster can route it.

-- include: _record

local lock, owner, ttl = KEYS[1], ARGV[1], tonumber(ARGV[2])
local record = redis.call('HGET', lock, owner)
local lease = record and read(owner, record)
if not lease or lease.expires <= now then return 0 end  -- an ended lease stays: the next token must be higher
-- First, and always: a server without memory refuses HSET as the first write of a script.
redis.call('PEXPIRE', lock, math.max(ttl, redis.call('PTTL', lock)))
write(lock, owner, now + ttl, lease.token, lease.acquired, lease.mode, lease.holder, lease.version)
return superseded_by(lease.holder) or 1
