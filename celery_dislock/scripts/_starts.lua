-- _starts.lua: when a lock with a rate was taken.
--   <lock>:starts   Redis TIME in microseconds of the starts, newest first; after them "1 most window_ms", the
--                   largest that any owner asked for: *most* starts are kept, for window_ms

-- include: _record
-- include: _terms

-- Redis TIME in microseconds of the newest start, or of the one *but* starts before it; 0: there is none.
local function newest(lock, but)
  return tonumber(redis.call('LINDEX', lock .. STARTS, but or 0)) or 0
end

-- Microseconds until one more start is within a rate, after *others*, a number of starts that are still to come.
-- 0: now.
local function due_in(lock, most, window, others)
  local before = tonumber(redis.call('LINDEX', lock .. STARTS, most - 1 - others % most))
  local wait = before and math.max(0, before + window * 1000 - now_us) or 0
  return wait + math.floor(others / most) * window * 1000
end

-- The rate that the starts are kept for: how many, and for how many milliseconds; nothing if that cannot be read.
local function kept_for(lock)
  local most, window = string.match(redis.call('LINDEX', lock .. STARTS, -1) or '', '^%d+ (%d+) (%d+)')
  if not most or #most > NUMBER_DIGITS or #window > NUMBER_DIGITS or tonumber(most) == 0 then return nil end
  return tonumber(most), tonumber(window)
end

local function add_start(lock, most, window)
  local starts = lock .. STARTS
  local kept, kept_ms = kept_for(lock)
  kept, kept_ms = math.max(most, kept or 0), math.max(window, kept_ms or 0)
  local there = redis.call('LPUSH', starts, now_as_token)
  redis.call('LTRIM', starts, 0, math.min(kept, there > 1 and there - 1 or 1) - 1)  -- without "1 most window_ms"
  redis.call('RPUSH', starts, string.format('1 %.0f %.0f', kept, kept_ms))
  redis.call('PEXPIRE', starts, kept_ms)
end

-- Count a start of a lock that is free, on terms with a rate; false if it is too early, or the clock was set back.
local function start_free(lock, terms)
  terms = parse_terms(terms)
  if newest(lock) > now_us or due_in(lock, terms.most, terms.window, 0) > 0 then return false end
  add_start(lock, terms.most, terms.window)
  return true
end
