-- _lasted.lua: how long bodies took lately for whose end a parked task waited, first in line.
--   <lock>:lasted   "1 mean_ms": of the times from acquisition to release, a mean in which the newest counts a quarter;
--                   gone two hours after the next one was to come
--     1            version of this format.  Later ones begin with the same fields

-- include: _lease

-- The mean in ms, and the version; nothing if it is not known.
local function lasted(lock)
  local seen, record = pcall(redis.call, 'GET', lock.name .. LASTED)
  local version, mean = string.match(seen and record or '', '^(%d+) (%d+)')
  if mean and #mean <= TIME_DIGITS then return tonumber(mean), version end
end

local function note_lasted(lock, took_ms)
  local head = redis.call('ZRANGE', lock.line, 0, 0)[1]
  if not (head and is_parked(head)) then return end
  local before, version = lasted(lock)
  if version and version ~= '1' then return end
  local mean = (before or took_ms) + (took_ms - (before or took_ms)) / 4
  pcall(redis.call, 'SET', lock.name .. LASTED, string.format('1 %.0f', mean), 'PX', COPY_MS + took_ms)
end
