-- _place.lua: how a waiter's place in line is written.
--   owner -> "1 deadline_ms ttl_ms terms holder"
--     1            version of this format.  Later ones begin with the same fields, up to the terms
--     deadline_ms  Redis TIME until which the place is kept; after it the waiter has died
--     ttl_ms, and so on   of the lease that the waiter asks for; see acquire.lua

-- include: _record
-- include: _terms

-- Parse a place.  Nothing if it cannot be read, or its waiter has died.  Without terms if only a later version knows
-- them.
local function read_place(record)
  local version, deadline, ttl, terms, holder =
    string.match(record or '', '^(%d+) (%d+) (%d+) (%S+) (.*)$')
  if not deadline or tonumber(deadline) <= now then return nil end
  return {
    owner = '', deadline = tonumber(deadline), ttl = tonumber(ttl), terms = parse_terms(terms), holder = holder,
    version = version,
  }
end
