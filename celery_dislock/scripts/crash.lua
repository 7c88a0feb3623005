-- crash.lua: count that the process of a delivery has died, and return how often it has died.
--
-- KEYS[1]   <lock>:crashes:<ticket>   hash: nonce -> "1"; the whole name, so that it is found while a slot moves
-- ARGV[1]   nonce     of this death
-- ARGV[2]   ttl_ms    integer > 0: how long the count is kept after the last death
--
-- Returns   how often
-- Touches that hash alone.  Sent twice, the death is counted once.

local crashes, nonce, ttl_ms = KEYS[1], ARGV[1], ARGV[2]
redis.call('HSET', crashes, nonce, '1')
redis.call('PEXPIRE', crashes, ttl_ms)
return redis.call('HLEN', crashes)
