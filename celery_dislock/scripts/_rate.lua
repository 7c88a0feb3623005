-- _rate.lua: how often a lock is taken.
--
-- A start is an acquisition that begins a body.  In any window of a rate, the cost of the starts is at most what the
-- rate says.  A gate is room for a start, which nobody else takes, nor moves back by a faster rate.  A parked task in its
-- first turn keeps one, and so does an owner that has one of several locks and waits for the next, until its body begins.
--   <lock>:starts   see _starts.lua

-- include: _override
-- include: _starts

local SOON_US = 15000000   -- one turn is given for a start within this time

-- The rate that holds for these terms: starts, and length of the window in ms; nothing if there is none.
local function rate_of(lock, terms)
  local set = overrides(lock).rate
  if set then return set.most, set.window end
  return terms.most, terms.window
end

-- The log of a lock, once in a script.  If the clock was set back, starts that are in the future are set to now.
local function starts_of(lock)
  if lock.log then return lock.log end
  local log, starts, later = log_of(lock.name), lock.name .. STARTS, 0
  lock.log = log
  if log.newest <= now_us then return log end
  while (tonumber(redis.call('LINDEX', starts, later)) or 0) > now_us do later = later + 1 end
  if later > 0 then redis.call('LTRIM', starts, later, -1) end
  for _ = 1, later do redis.call('LPUSH', starts, now_as_token) end
  log.newest, log.asked = now_us, math.min(log.asked, now_us)
  if log.credit then log.since, log.over_us = math.min(log.since, now_us), math.min(log.over_us, now_us) end
  if log.quantum > 1 or log.credit then write_record(starts, log, 0) end
  return log
end

-- Microseconds until one more start is within the rate that holds for these terms, after *others*, the cost of starts
-- that are still to come; 0: now.
local function starts_in(lock, terms, others)
  local set, back = overrides(lock).rate, held_back(lock)
  local opens = back and (back.until_ms - now) * 1000 or 0
  local most, window = rate_of(lock, terms)
  if not most then return opens end
  local log = starts_of(lock)
  local due = due_in(lock.name, log, most, window, terms.cost, others)
  for rule, units in pairs(others > 0 and not set and lock.gate_rules or {}) do
    local gate = units > 0 and parse_terms(rule)
    if gate and gate.most and (gate.most ~= most or gate.window ~= window) then
      due = math.max(due, due_in(lock.name, log, gate.most, gate.window, terms.cost, others))
    end
  end
  if set and set.until_ms > 0 then  -- then the code's rate holds again
    local of_code = terms.most and due_in(lock.name, log, terms.most, terms.window, terms.cost, others) or 0
    due = math.min(due, math.max((set.until_ms - now) * 1000, of_code))
  end
  return math.max(opens, due)
end

-- The holder in a refusal if it is only too early.
local function as_early(lock, terms)
  local most, window = rate_of(lock, terms)
  local back = held_back(lock)
  return {early = true, most = most, window_ms = window, held_back = back and true, note = back and back.note}
end

-- Count a start with these terms.  It is kept for as long as the longer of two rates needs it, the code's and an
-- operator's.
local function count_start(lock, terms)
  local most, window = rate_of(lock, terms)
  if most then
    add_start(lock.name, starts_of(lock), math.max(most, terms.most or 0), math.max(window, terms.window or 0), terms)
  end
end
