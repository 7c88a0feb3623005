-- remember.lua: leave a mark beside a lock, about a task.
--
-- KEYS[1]   <lock>:mark:<task id>   string; the whole name, so that it is found while a slot moves
-- ARGV[1]   mark
-- ARGV[2]   ttl_ms    integer > 0
--
-- Returns   nothing
--
-- Touches the mark alone.  An id may look like another task's ticket, so the mark has a name of its
-- own, apart from those of parked tasks that are done.  Sent twice, it is there all the same.

redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
