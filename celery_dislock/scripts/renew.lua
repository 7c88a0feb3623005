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

-- include: _record

local lock, owner, ttl = KEYS[1], ARGV[1], tonumber(ARGV[2])

local record = redis.call('HGET', lock, owner)
if not record then return 0 end
local expires, rest = string.match(record, '^1 (%d+)( %d+ %d+ [xs] .*)$')
if expires and tonumber(expires) <= now then return 0 end  -- left there: the next token must be higher
if expires then
  -- First, and always: a server without memory refuses HSET as the first write of a script.
  redis.call('PEXPIRE', lock, math.max(ttl, redis.call('PTTL', lock)))
  redis.call('HSET', lock, owner, string.format('1 %.0f', now + ttl) .. rest)
  return 1
end

-- include: _lease

parse(record)  -- raises: it cannot be read
