-- release.lua: end a lease at its owner's wish.
--
-- KEYS[1]   lock
-- ARGV[1]   owner
-- ARGV[2]   at_least_ms   integer >= 0: hold on until so long after the acquisition
--
-- Returns   1 released   0 not held: nothing was changed
--
-- Touches no other owner's lease.  Sent twice, the second answers 0.

local lease = redis.call('HGET', lock, ARGV[1])
if not lease then return 0 end

local expires = tonumber(string.match(lease, '^1 (%d+)'))
finish(ARGV[1], lease, tonumber(ARGV[2]))
return expires > now and 1 or 0
