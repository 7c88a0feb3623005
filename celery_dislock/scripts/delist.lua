-- delist.lua: strike a lock off that has no parked tasks, unless somebody is about to park one.
--
-- KEYS[1]   lines     see enlist.lua
-- ARGV[1]   lock
-- ARGV[2]   seen      its number before its line was found empty
--
-- Returns   1 struck off   0 not: it was raised meanwhile, or is gone
--
-- Touches that hash alone.  Sent twice, the second answers 0.

if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
return redis.call('HDEL', KEYS[1], ARGV[1])
