-- take_over.lua: take over the leases that another owner has left to run out, or its places in line.
--
-- KEYS      the locks
-- ARGV[1]   from      the owner that has left them
-- ARGV[2]   to        the owner that takes them over
-- ARGV[3]   holder    JSON, for messages and tools
--
-- Returns   how many were taken over, with their expiry and a new token
-- Touches the locks, their lines and places, and the wake list of the owner that has left.  A lease that has ended
-- is not revived.  Of two owners that try, one succeeds; sent twice, the second answers 0.

-- include: _grant

local taken = 0
-- Take over the place in line of an owner that has given up its worker slot.
local function take_place(lock, from, to)
  local joined, place = redis.call('ZSCORE', lock.line, from), redis.call('HGET', lock.places, from)
  if not (joined and place) then return end
  redis.call('ZADD', lock.line, joined, to)
  redis.call('HSET', lock.places, to, place)
  redis.call('ZREM', lock.line, from)
  redis.call('HDEL', lock.places, from)
end

for _, key in ipairs(KEYS) do
  local lock = count_leases(open(key))
  local left = lease_of(lock, '~' .. ARGV[1])
  if not left then
    line_exists(lock)  -- or an error, before anything is done
    take_place(lock, ARGV[1], ARGV[2])
    local is_unread = redis.call('DEL', lock.name .. WAKE .. ARGV[1]) == 1
    if is_unread then left = lease_of(lock, ARGV[1]) end  -- that owner was handed the lock meanwhile
  end
  if left then
    write_first(lock.name)
    put(lock, {
      owner = ARGV[2], expires = left.expires, token = new_token(lock), acquired = left.acquired,
      mode = left.mode, holder = ARGV[3],
    })
    end_lease(lock, left)  -- last: a hash that is empty loses its expiry
    taken = taken + 1
  end
end
return taken
