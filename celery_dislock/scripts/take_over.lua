-- take_over.lua: go on with leases that another owner has left to run out.
--
-- KEYS      the locks
-- ARGV[1]   owner that has left them
-- ARGV[2]   owner that goes on
-- ARGV[3]   holder    JSON, for messages and tools
--
-- Returns   how many were taken over, with their expiry and a new token
--
-- Nobody gets in between.  What has ended is not revived.  Of two owners that try, one succeeds;
-- sent twice, the second answers 0.

-- include: _lease

local left = '~' .. ARGV[1]
local taken = 0
for _, key in ipairs(KEYS) do
  use(key)
  count_leases()
  local lease = redis.call('HGET', lock, left)
  if lease then
    local expires, _, acquired, rest = parse(lease)
    local mode = string.sub(rest, 1, 1)
    write(ARGV[2], expires, math.max(now_us, newest + 1), acquired, mode .. ' ' .. ARGV[3])
    redis.call('HDEL', lock, left)  -- last: a hash that is empty loses its expiry
    taken = taken + 1
  end
end
return taken
