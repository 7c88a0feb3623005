-- remember.lua: leave a mark beside a lock, about a task.
--
-- KEYS[1]   lock
-- ARGV[1]   task id
-- ARGV[2]   mark
-- ARGV[3]   ttl_ms    integer > 0
--
-- Returns   nothing
--
-- The mark is the string <lock>:mark:<task id>, apart from those of parked tasks: an id may look like
-- another task's ticket.  Sent twice, it is there all the same.

-- include: _lease

redis.call('SET', KEYS[1] .. ':mark:' .. ARGV[1], ARGV[2], 'PX', ARGV[3])
