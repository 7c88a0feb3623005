-- _terms.lua: which other leases a lock admits beside one that is asked for.
--   "mode:limit" or "mode:limit:most/window_ms"   in requests and records; no other file knows what is in this word
--     mode         x exclusive: admitted beside no shared lease, and fewer than limit of its own
--                  s shared: admitted beside no exclusive lease
--     limit        integer > 0
--     most         integer > 0: so many starts in any window of this length; see _rate.lua

local TICKET_ENDS = string.byte('#')  -- the name of a ticket in line, and of its turn's owner
local NUMBER_DIGITS = 15  -- of a number that a record has

-- Nothing if they cannot be read.
local function parse_terms(text)
  local mode, limit, rate = string.match(text, '^([xs]):(%d+)(.*)$')
  if not mode or #limit > NUMBER_DIGITS then return nil end
  local most, window = string.match(rate, '^:(%d+)/(%d+)$')
  if rate ~= '' and (not most or #most > NUMBER_DIGITS or #window > NUMBER_DIGITS or tonumber(most) == 0) then return nil end
  return {mode = mode, limit = tonumber(limit), most = tonumber(most), window = tonumber(window), rate = rate}
end

local function write_terms(terms) return string.format('%s:%.0f%s', terms.mode, terms.limit, terms.rate or '') end

-- Of a record that a later version has written.
local ALONE = {mode = 'x', limit = 1}

-- Whether an owner wants the lock for itself; that is the usual case.
local function are_alone(terms) return terms and terms.mode == 'x' and terms.limit == 1 and not terms.most end

-- Whether a lease keeps a gate; see _rate.lua.  That of a ticket says so in its holder, as only scripts write its
-- owner; that of a waiter for several locks, or its place, before its holder.
local GATE = '{"gate"'
local function has_gate(lease)
  if string.sub(lease.holder, 1, #GATE) == GATE then return true end
  return string.byte(lease.owner, -1) == TICKET_ENDS and string.find(lease.holder, '"gate"', 1, true)
end

local function with_gate(holder)
  return string.format('%s:true%s', GATE, holder == '{}' and '' or ',') .. string.sub(holder, 2)
end

-- A mark before the holder of a lease that the newest of its key waits for: the id of that task, encoded.
local function superseded_by(holder) return string.match(holder, '^{"superseded":"([^"]*)"') end

-- A lease takes room of its mode.  One of a mode that only a later version knows takes room of each.
local function take_room(lock, lease, many)
  if lease.mode ~= 's' then lock.x = lock.x + many end
  if lease.mode ~= 'x' then lock.s = lock.s + many end
  if has_gate(lease) then lock.gates = lock.gates + many end
end

-- *limit* is what an operator has set, or nothing.
local function has_room(lock, terms, limit)
  limit = limit or terms.limit
  if terms.mode == 's' then return lock.x == 0 and limit > 0 end
  return lock.s == 0 and lock.x < limit
end
