-- recall.lua: read the mark that remember.lua has left about a task.
--
-- KEYS[1]   <lock>:mark:<task id>   string
--
-- Returns   the mark; nothing where there is none
--
-- Touches the mark alone, and changes nothing.

return redis.call('GET', KEYS[1])
