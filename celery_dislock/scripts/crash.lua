-- crash.lua: count that the process of a delivery has died, and tell how often that was.
--
-- KEYS[1]   <lock>:crashes:<ticket>   hash: nonce -> "1"; the whole name, so that it is found while a slot moves
-- ARGV[1]   nonce     of this death
-- ARGV[2]   ttl_ms    integer > 0, for which it is remembered after the last death
--
-- Returns   how often
-- Touches that hash alone.  Sent twice, it is counted once.

redis.call('HSET', KEYS[1], ARGV[1], '1')
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return redis.call('HLEN', KEYS[1])
