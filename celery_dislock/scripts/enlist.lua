-- enlist.lua: note that a lock has, or is about to have, parked tasks.
--
-- KEYS[1]   lines     hash: lock -> a number that each who parks raises
-- ARGV[1]   lock
--
-- Returns   nothing
--
-- Touches that hash alone.  It is outside the slots of the locks, so it is written before the task is
-- parked: a line that nobody knows of would never be swept.  Sent twice, the number is raised twice,
-- which does no harm.

-- include: _kept

redis.call('HINCRBY', KEYS[1], ARGV[1], 1)
redis.call('PEXPIRE', KEYS[1], KEPT_MS)
