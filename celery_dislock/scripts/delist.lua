-- delist.lua: strike a lock off that has no parked tasks, unless somebody may be about to park one.
--
-- KEYS[1]   lines     see enlist.lua
-- ARGV[1]   lock
-- ARGV[2]   seen      its number before its line was found empty
--
-- Returns   1 struck off   0 not: it was raised meanwhile or a short time ago, or is gone
--
-- Touches that hash alone.  Sent twice, the second answers 0.
--
-- A process that parks a task raises the number first.  If parking takes it longer than half of YOUNG_US, it
-- raises the number again.

local YOUNG_US = 60000000  -- microseconds

if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
local time = redis.call('TIME')
if time[1] * 1000000 + time[2] < ARGV[2] + YOUNG_US then return 0 end
return redis.call('HDEL', KEYS[1], ARGV[1])
