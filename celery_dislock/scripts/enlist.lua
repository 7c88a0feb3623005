-- enlist.lua: note that a lock has parked tasks, or is about to; or strike off one that has none.
--
-- KEYS[1]   lines   hash: lock -> a number that each who parks raises: Redis TIME in microseconds, or
--                   more if the clock was set back, so that none comes again
-- ARGV[1]   lock
-- ARGV[2]   seen    strike it off: its number before its line was found empty   left out: note it
--
-- Returns   nothing
-- Touches that hash alone.  It is outside the slots of the locks, so it is written before the task is
-- parked: a line that nobody knows of would never be swept.  If parking takes longer than half of YOUNG_US,
-- the number is raised again.  Sent twice, it is raised twice, which does no harm.

-- include: _record

local YOUNG_US = 60000000  -- microseconds in which somebody may be about to park a task

local number, seen = redis.call('HGET', KEYS[1], ARGV[1]), ARGV[2]
if not seen then
  redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f', math.max((number or 0) + 1, now_us)))
  redis.call('PEXPIRE', KEYS[1], KEPT_MS)
elseif number == seen and now_us >= seen + YOUNG_US then
  redis.call('HDEL', KEYS[1], ARGV[1])
end
