-- mark.lua: leave a mark about a task beside a lock, or read it.
--
-- KEYS[1]   <lock>:mark:<task id>   the whole name, so that it is found while a slot moves
-- ARGV[1]   mark     left out: only read it
-- ARGV[2]   ttl_ms   integer > 0
--
-- Returns   the mark that was read; nothing where there is none, or one was left
-- Touches the mark alone.  An id may look like another task's ticket, so that parked tasks which are done
-- have marks of another name.  Sent twice, it is there all the same.

if #ARGV == 0 then return redis.call('GET', KEYS[1]) end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
