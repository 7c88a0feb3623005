-- _rate.lua: how often a lock is taken.
--
-- A start is an acquisition that begins a body.  In any window of a rate, at most as many starts are counted as the
-- rate says.  A gate is room for one start, which nobody else takes.  A parked task in its first turn keeps one, and
-- so does an owner that has one of several locks and waits for the next, until its body begins.
--   <lock>:starts   see _starts.lua
--   <lock>:rate     "1 until_ms most window_ms since_ms note", as an operator or a body has set it
--     until_ms      Redis TIME until which nobody starts
--     most          starts in any window of window_ms at most, instead of the code's; 0: the code's rate holds
--     since_ms      Redis TIME at which it was set

-- include: _lease
-- include: _starts

local SOON_US = 15000000   -- one turn is given for a start within this time

local function rate_set(lock)
  if lock.rate == nil then
    local found = unless_hidden(pcall(redis.call, 'GET', lock.name .. RATE))
    local until_ms, most, window, since, note = string.match(found or '', '^%d+ (%d+) (%d+) (%d+) (%d+) (.*)$')
    if found and (not note or #until_ms > TIME_DIGITS or #most > NUMBER_DIGITS or #window > NUMBER_DIGITS) then
      error('dislock: a rate in it cannot be read', 0)
    end
    lock.rate = found and {
      until_ms = tonumber(until_ms), most = tonumber(most), window = tonumber(window), since = tonumber(since),
      note = note, lasts_us = redis.call('PTTL', lock.name .. RATE) * 1000,  -- below 0: until it is taken back
    }
  end
  return lock.rate
end

-- The rate that holds for these terms: starts, and length of the window in ms; nothing if there is none.
local function rate_of(lock, terms)
  local set = rate_set(lock)
  if set and set.most > 0 then return set.most, set.window end
  return terms.most, terms.window
end

-- If the clock was set back, set starts that are in the future to now.
local function set_back(lock)
  if lock.seen then return end
  lock.seen = true
  local starts, later = lock.name .. STARTS, 0
  while newest(lock.name, later) > now_us do later = later + 1 end
  if later > 0 then redis.call('LTRIM', starts, later, -1) end
  for _ = 1, later do redis.call('LPUSH', starts, now_as_token) end
end

-- Microseconds until one more start is within the rate that holds for these terms, after *others*, a number of starts
-- that are still to come; 0: now.
local function starts_in(lock, terms, others)
  local set = rate_set(lock)
  local held_back = set and math.max(0, set.until_ms - now) * 1000 or 0
  local most, window = rate_of(lock, terms)
  if not most then return held_back end
  set_back(lock)
  local due = due_in(lock.name, most, window, others)
  if set and set.most > 0 and set.lasts_us >= 0 then  -- then the code's rate holds again
    local of_code = terms.most and due_in(lock.name, terms.most, terms.window, others) or 0
    due = math.min(due, math.max(set.lasts_us, of_code))
  end
  return math.max(held_back, due)
end

-- The holder in a refusal if it is only too early.
local function as_early(lock, terms)
  local most, window = rate_of(lock, terms)
  local set = rate_set(lock)
  local held_back = set and set.until_ms > now
  return {early = true, most = most, window_ms = window, held_back = held_back or nil, note = held_back and set.note or nil}
end

-- Count a start with these terms.  It is kept for as long as the longer of two rates needs it, the code's and an
-- operator's.
local function count_start(lock, terms)
  local most, window = rate_of(lock, terms)
  if most then
    add_start(lock.name, math.max(most, terms.most or 0), math.max(window, terms.window or 0))
  end
end
