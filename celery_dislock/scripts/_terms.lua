-- _terms.lua: the terms on which a lock is taken: which other leases it admits beside this one, and how often.
--   "mode:limit" or "mode:limit:most/window_ms"   in requests and records; no other file parses this text
--     mode         x exclusive: admitted beside no shared lease, and fewer than limit of its own
--                  s shared: admitted beside no exclusive lease
--     limit        integer > 0
--     most         integer > 0: maximum number of starts in any window of window_ms; see _rate.lua

local TICKET_ENDS = string.byte('#')  -- last byte of a ticket's member of a line, which no owner's name has
local NUMBER_DIGITS = 15  -- of other numbers in records

-- Nothing if the terms cannot be read.
local function parse_terms(text)
  local mode, limit, rate = string.match(text, '^([xs]):(%d+)(.*)$')
  if not mode or #limit > NUMBER_DIGITS then return nil end
  local most, window = string.match(rate, '^:(%d+)/(%d+)$')
  if rate ~= '' and (not most or #most > NUMBER_DIGITS or #window > NUMBER_DIGITS or tonumber(most) == 0) then return nil end
  return {mode = mode, limit = tonumber(limit), most = tonumber(most), window = tonumber(window), rate = rate}
end

local function write_terms(terms) return string.format('%s:%.0f%s', terms.mode, terms.limit, terms.rate or '') end

-- The terms of a record that a later version has written.
local ALONE = {mode = 'x', limit = 1}

-- Whether an owner wants the lock for itself; that is the usual case.
local function are_alone(terms) return terms and terms.mode == 'x' and terms.limit == 1 and not terms.most end

-- Whether a lease, or a place, keeps a gate; see _rate.lua.  The lease of a ticket says so anywhere in its holder, as
-- only scripts write that.  The lease or place of a waiter for several locks says so at the start of its holder.
local GATE = '{"gate"'
local function has_gate(lease)
  if string.sub(lease.holder, 1, #GATE) == GATE then return true end
  return string.byte(lease.owner, -1) == TICKET_ENDS and string.find(lease.holder, '"gate"', 1, true)
end

local function with_gate(holder)
  return string.format('%s:true%s', GATE, holder == '{}' and '' or ',') .. string.sub(holder, 2)
end

-- Count a lease by its mode.  A lease of a mode that only a later version knows counts as one of each mode.
local function take_room(lock, lease, many)
  if lease.mode ~= 's' then lock.x = lock.x + many end
  if lease.mode ~= 'x' then lock.s = lock.s + many end
  if has_gate(lease) then lock.gates = lock.gates + many end
end

-- Whether one more lease with these terms fits.  *limit* is what an operator has set, or nothing.
local function has_room(lock, terms, limit)
  limit = limit or terms.limit
  if terms.mode == 's' then return lock.x == 0 and limit > 0 end
  return lock.s == 0 and lock.x < limit
end
