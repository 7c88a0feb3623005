-- recall.lua: read the mark that remember.lua has left about a task.
--
-- KEYS[1]   lock
-- ARGV[1]   task id
--
-- Returns   the mark; nothing where there is none
--
-- Changes nothing.

-- include: _lease

return redis.call('GET', KEYS[1] .. ':mark:' .. ARGV[1])
