-- _place.lua: how a waiter's place in line is written.
--
--   owner -> "1 deadline_ms ttl_ms mode limit holder"
--
--     deadline_ms  Redis TIME until which the place is kept; after it the waiter has died
--     ttl_ms, limit, and so on   of the lease that it asks for; see acquire.lua

-- Nothing if it cannot be read, or its waiter has died.
local function read_place(record)
  local deadline, ttl, mode, limit, holder = string.match(record or '', '^1 (%d+) (%d+) (%a) (%d+) (.*)$')
  if not deadline or tonumber(deadline) <= now then return nil end
  return {
    deadline = tonumber(deadline), ttl = tonumber(ttl), mode = mode, limit = tonumber(limit), holder = holder,
  }
end
