-- enlist.lua: note that a lock has, or is about to have, parked tasks.
--
-- KEYS[1]   lines     hash: lock -> a number that each who parks raises: Redis TIME in microseconds, or
--                     more if the clock was set back, so that none comes again
-- ARGV[1]   lock
--
-- Returns   nothing
--
-- Touches that hash alone.  It is outside the slots of the locks, so it is written before the task is
-- parked: a line that nobody knows of would never be swept.  Sent twice, the number is raised twice,
-- which does no harm.

-- include: _kept

local time = redis.call('TIME')
local before = tonumber(redis.call('HGET', KEYS[1], ARGV[1]) or 0)
local number = math.max(before + 1, time[1] * 1000000 + time[2])
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f', number))
redis.call('PEXPIRE', KEYS[1], KEPT_MS)
