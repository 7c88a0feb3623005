-- remember.lua: leave a mark beside a lock, about a task.
--
-- KEYS[1]   lock
-- ARGV[1]   task id
-- ARGV[2]   mark
-- ARGV[3]   ttl_ms    integer > 0
--
-- Returns   nothing
--
-- The mark is the string <lock>:done:<task id>.  Sent twice, it is there all the same.

-- include: _lease

redis.call('SET', KEYS[1] .. ':done:' .. ARGV[1], ARGV[2], 'PX', ARGV[3])
