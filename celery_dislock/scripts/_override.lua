-- _override.lua: what people, or a body, have set for a lock in place of what its code says.
--   <lock>:limit   a line for each: "2 name value since_ms until_ms note"
--     name         limit   exclusive leases at a time; 0: nobody is admitted, shared leases neither
--                  rate    "most/window_ms", see _rate.lua
--                  pause   nobody starts, as an operator says; its value is "-", and it has an end
--                  back    the same, as a body says
--     since_ms     Redis TIME at which it was set
--     until_ms     Redis TIME at which it ends; 0: it is taken back.  The key has no expiry then: tasks that an operator
--                  has stopped must not run because some days have passed
--     2            version of this format.  Later ones begin with the same fields, up to until_ms.  Version 1 was
--                  "1 limit since_ms note"

-- include: _lease

-- What is set for a lock, by name; read once in a script.
local function overrides(lock)
  if lock.set then return lock.set end

  -- Nothing if a line cannot be read, or has a name that only a later version knows: it may bar owners.
  local function parse_override(line)
    local name, value, since, until_ms, note = string.match(line, '^%d+ (%a+) (%S+) (%d+) (%d+) (.*)$')
    if not name then
      name, until_ms, value, since, note = 'limit', '0', string.match(line, '^1 (%d+) (%d+) (.*)$')
    end
    local most, window = string.match(value or '', '^(%d+)/?(%d*)$')
    local is_known = name == 'pause' or name == 'back' or most and #most <= NUMBER_DIGITS and #window <= NUMBER_DIGITS
      and (name == 'limit' and window == '' or name == 'rate' and window ~= '' and tonumber(most) > 0)
    if not is_known or #since > TIME_DIGITS or #until_ms > TIME_DIGITS then return nil end
    return {
      name = name, value = value, most = tonumber(most), window = tonumber(window), since = tonumber(since),
      until_ms = tonumber(until_ms), note = note,
    }
  end

  local found, record = {}, fail_unless_moving(pcall(redis.call, 'GET', lock.name .. LIMIT)) or ''
  if string.find(record, '^1 ') then record = string.gsub(record, '\n', ' ') end  -- all of it is one limit
  for line in string.gmatch(record, '[^\n]+') do
    local set = parse_override(line)
    if not set then error('dislock: a limit in it cannot be read', 0) end
    if set.until_ms == 0 or set.until_ms > now then found[set.name] = set end
  end
  lock.set = found
  return found
end

-- The limit that an operator has set, and its note; nothing if the code's limit holds.
local function limit_set(lock)
  local set = overrides(lock).limit
  if set then return set.most, set.note end
end

-- What holds a lock back for longest; nothing if nothing does.
local function held_back(lock)
  local pause, back = overrides(lock).pause, overrides(lock).back
  if pause and back then return pause.until_ms > back.until_ms and pause or back end
  return pause or back
end

-- Whether nobody may start, or nobody until a time.
local function is_paused(lock) return limit_set(lock) == 0 or held_back(lock) end
