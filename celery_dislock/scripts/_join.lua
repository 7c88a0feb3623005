-- _join.lua: how one joins a lock's line, which _line.lua describes.  Included after _record.lua by the
-- scripts that put somebody in line.  *lock* is a table with the names of its line and places.

-- When the next in line joins: after all that are there, also where the clock was set back.
local function joins_at(lock)
  local last = redis.call('ZRANGE', lock.line, -1, -1, 'WITHSCORES')[2]
  return math.max(now_us, tonumber(last or 0) + 1)
end

local function join_line(lock, owner, place_ms, ttl_ms, mode, limit, holder)
  local joined = not redis.call('ZSCORE', lock.line, owner) and joins_at(lock)
  -- Each key is read or written before the next one is changed: one of another type is an error first.
  redis.call('HSET', lock.places, owner,
    string.format('1 %.0f %.0f %s %.0f %s', now + place_ms, ttl_ms, mode, limit, holder))
  if joined then redis.call('ZADD', lock.line, string.format('%.0f', joined), owner) end
  live_at_least(lock.line, place_ms)
  live_at_least(lock.places, place_ms)
end
