-- _terms.lua: which other leases a lock admits beside one that is asked for.
--   "mode:limit"   in requests and records; no other file knows what is in this word
--     mode         x exclusive: admitted beside no shared lease, and fewer than limit of its own
--                  s shared: admitted beside no exclusive lease
--     limit        integer > 0

local NUMBER_DIGITS = 15  -- of a number that a record has

-- Nothing if they cannot be read.
local function parse_terms(text)
  local mode, limit = string.match(text, '^([xs]):(%d+)$')
  if not mode or #limit > NUMBER_DIGITS then return nil end
  return {mode = mode, limit = tonumber(limit)}
end

local function write_terms(terms) return string.format('%s:%.0f', terms.mode, terms.limit) end

-- Of a record that a later version has written.
local ALONE = {mode = 'x', limit = 1}

-- Whether an owner wants the lock for itself; that is the usual case.
local function are_alone(terms) return terms and terms.mode == 'x' and terms.limit == 1 end

-- A lease takes room of its mode.  One of a mode that only a later version knows takes room of each.
local function take_room(lock, mode, many)
  if mode ~= 's' then lock.x = lock.x + many end
  if mode ~= 'x' then lock.s = lock.s + many end
end

-- *limit* is what an operator has set, or nothing.
local function has_room(lock, terms, limit)
  limit = limit or terms.limit
  if terms.mode == 's' then return lock.x == 0 and limit > 0 end
  return lock.s == 0 and lock.x < limit
end
