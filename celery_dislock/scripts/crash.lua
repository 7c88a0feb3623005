-- crash.lua: count that the process of a delivery has died, and tell how often that was.
--
-- KEYS[1]   <lock>:crashes:<ticket>   hash: nonce -> "1"; the whole name, so that it is found while a slot moves
-- ARGV[1]   nonce     of this death
-- ARGV[2]   ttl_ms    integer > 0, for which it is remembered after the last death
--
-- Returns   how often
-- Touches that hash alone.  Sent twice, it is counted once.

local crashes, nonce, ttl_ms = KEYS[1], ARGV[1], ARGV[2]
redis.call('HSET', crashes, nonce, '1')
redis.call('PEXPIRE', crashes, ttl_ms)
return redis.call('HLEN', crashes)
