-- counts.lua: read what the workers have counted; see count.lua.
--
-- KEYS[1]   index   zset
-- ARGV[1]   name    of a worker's counts, and so on; none: tell the names
--
-- Returns   {name, ...}, of the workers that have counts; or for each name {field, amount, ...}
-- Touches the index, or what was named; changes nothing.

if #ARGV == 0 then return redis.call('ZRANGE', KEYS[1], 0, -1) end
local told = {}
for i, name in ipairs(ARGV) do told[i] = redis.call('HGETALL', name) end
return told
