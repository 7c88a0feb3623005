-- _index.lua: how the sweep knows which lines there are.
--   <prefix>:lines:<broker>   hash: lock -> a number that grows each time the line is listed: Redis TIME in
--                           microseconds, or more if the clock was set back, so that no number comes again
--
-- A line that is not listed is never swept: behind a holder that died it would stand still.  park.lua lists the line
-- itself.  In a cluster it cannot, as the index is on another node than most locks.  There the client lists the line
-- first, and park.lua refuses to put anything in it later than LISTED_US after that.  A line that is found empty is
-- struck off, but not within YOUNG_US (see lines.lua) after it was listed: something could still be put in it.

-- include: _record

local LISTED_US = 30000000

local function list_line(index, lock)
  local number = redis.call('HGET', index, lock)
  redis.call('HSET', index, lock, string.format('%.0f', math.max((tonumber(number) or 0) + 1, now_us)))
  redis.call('PEXPIRE', index, KEPT_MS)
end
