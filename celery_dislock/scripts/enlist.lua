-- enlist.lua: note that a lock is about to have parked tasks; or strike off one that has none.
--
-- KEYS[1]   lines   see _index.lua
-- ARGV[1]   lock
-- ARGV[2]   seen    strike it off: its number before its line was found empty   left out: note it
--
-- Returns   nothing
-- Touches that hash alone.  Sent twice, its number is raised twice, which does no harm.

-- include: _index

local seen = ARGV[2]
if not seen then list_line(KEYS[1], ARGV[1])
elseif redis.call('HGET', KEYS[1], ARGV[1]) == seen then redis.call('HDEL', KEYS[1], ARGV[1]) end
