-- take_over.lua: go on with leases that another owner has left to run out.
--
-- KEYS      the locks
-- ARGV[1]   owner that has left them
-- ARGV[2]   owner that goes on
-- ARGV[3]   holder    JSON, for messages and tools
--
-- Returns   how many were taken over, with their expiry and a new token
--
-- Touches the locks alone.  Nobody gets in between.  What has ended is not revived.  Of two owners that
-- try, one succeeds; sent twice, the second answers 0.

-- include: _record
-- include: _lease
-- include: _grant

local taken = 0
for _, key in ipairs(KEYS) do
  local lock = count_leases(open(key))
  local left = lease_of(lock, '~' .. ARGV[1])
  if left then
    put(lock, {
      owner = ARGV[2], expires = left.expires, token = new_token(lock), acquired = left.acquired,
      mode = left.mode, holder = ARGV[3],
    })
    drop(lock, left)  -- last: a hash that is empty loses its expiry
    taken = taken + 1
  end
end
return taken
