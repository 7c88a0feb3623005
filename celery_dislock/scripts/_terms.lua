-- _terms.lua: the terms on which a lock is taken: which other leases it admits beside this one, and how often.
--   "mode:limit", or "mode:limit:most/window_ms", or one of these and "*cost"
--                  in requests and records; no other file parses this text
--     mode         x exclusive: admitted beside no shared lease, and fewer than limit of its own
--                  s shared: admitted beside no exclusive lease
--     limit        integer > 0
--     most         integer > 0: maximum cost of the starts in any window of window_ms; see _rate.lua
--     cost         integer > 0: units of the limit that the lease takes, and starts that it counts for; left out: 1.  If
--                  an operator, or a newer word of the code, admits less, it takes all of that

local TICKET_ENDS = string.byte('#')  -- last byte of a ticket's member of a line, which no owner's name has
local NUMBER_DIGITS = 15  -- of other numbers in records

-- Nothing if the terms cannot be read.
local function parse_terms(text)
  local mode, limit, rate, cost = string.match(text, '^([xs]):(%d+)([:/%d]*)%*?(%d*)$')
  if not mode or #limit > NUMBER_DIGITS or #cost > NUMBER_DIGITS or tonumber(cost) == 0 then return nil end
  local most, window = string.match(rate, '^:(%d+)/(%d+)$')
  if rate ~= '' and (not most or #most > NUMBER_DIGITS or #window > NUMBER_DIGITS or tonumber(most) == 0) then return nil end
  return {
    mode = mode, limit = tonumber(limit), most = tonumber(most), window = tonumber(window), rate = rate,
    cost = tonumber(cost) or 1, has_cost = cost ~= '',
  }
end

-- The terms without the cost, which is that of one task.
local function write_rule(terms) return string.format('%s:%.0f%s', terms.mode, terms.limit, terms.rate or '') end

local function write_terms(terms)
  return write_rule(terms) .. (terms.has_cost and string.format('*%.0f', terms.cost) or '')
end

-- The mode in the record of a lease: with the units that it takes, if it takes more than one.
local function mode_of(terms) return terms.cost > 1 and string.format('%s%.0f', terms.mode, terms.cost) or terms.mode end

-- The terms of a record that a later version has written.
local ALONE = {mode = 'x', limit = 1, cost = 1}

-- Whether an owner wants the lock for itself; that is the usual case.
local function are_alone(terms)
  return terms and terms.mode == 'x' and terms.limit == 1 and terms.cost == 1 and not terms.most
end

-- Whether a lease, or a place, keeps a gate; see _rate.lua.  The lease of a ticket says so anywhere in its holder, as
-- only scripts write that.  The lease or place of a waiter for several locks says so at the start of its holder.
local function has_gate(lease)
  if string.sub(lease.holder, 1, 7) == '{"gate"' then return true end
  return string.byte(lease.owner, -1) == TICKET_ENDS and string.find(lease.holder, '"gate"', 1, true)
end

local function with_gate(holder, terms)
  return string.format('{"gate":%s%s', cjson.encode(write_rule(terms)), holder == '{}' and '' or ',') .. string.sub(holder, 2)
end

-- The mode of a lease, the units that it takes, and what its owner has spent, if it has said that.
local function units_of(lease)
  if #lease.mode == 1 then return lease.mode, 1 end
  local mode, units, spent = string.match(lease.mode, '^(%a+)(%d*):?(%d*)$')
  return mode or lease.mode, tonumber(units) or 1, tonumber(spent)
end

-- Count a lease by its mode.  A lease of a mode that only a later version knows counts as one of each mode.
local function take_room(lock, lease, sign)
  local mode, units = units_of(lease)
  if mode ~= 's' then lock.x = lock.x + sign * units end
  if mode ~= 'x' then lock.s = lock.s + sign * units end
  if has_gate(lease) then
    lock.gates = lock.gates + sign * units
    local rule = string.gsub(string.match(lease.holder, '"gate":"([^"]*)"') or '', '\\', '')
    lock.gate_rules[rule] = (lock.gate_rules[rule] or 0) + sign * units
  end
end

-- Whether one more lease with these terms fits.  *limit* is what an operator has set, or nothing.
local function has_room(lock, terms, limit)
  limit = limit or terms.limit
  if terms.mode == 's' then return lock.x == 0 and limit > 0 end
  return lock.s == 0 and limit > 0 and lock.x + math.min(terms.cost, limit) <= limit
end
