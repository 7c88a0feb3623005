-- mark.lua: leave a mark about a task beside a lock, or read it.
--
-- KEYS[1]   <lock>:mark:<task id>   the whole name, so that it is found while a slot moves
-- ARGV[1]   mark     left out: only read it
-- ARGV[2]   ttl_ms   integer > 0
--
-- Returns   the mark that was read; nothing if there is none, or if one was left
-- Touches the mark alone.  An id may look like another task's ticket, so the done-marks of parked tasks have other
-- names.  Safe to send twice.

if #ARGV == 0 then return redis.call('GET', KEYS[1]) end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
