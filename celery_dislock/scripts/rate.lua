-- rate.lua: let a lock be taken more or less often than the code says, or by nobody for some time.
--
-- KEYS[1]   lock
-- ARGV      rate       "most/window_ms": at most *most* starts in any window   "0/0": what the code says holds
--                      again   empty: the rate stays as it is
--           back_ms    > 0: nobody starts for this time   0: owners may start at once   empty: this stays as it is
--           ttl_ms     > 0: how long the rate lasts   0: until it is taken back; of no effect without a rate
--           note       text for people; if it is empty, a rate that stays as it is keeps its own note
--           home       the caller's broker; left out or empty: it cannot publish
--           pauses     1: this is an operator's pause with an end: one without an end is taken back   left out: it is not
--
-- Returns   {before, turns}   before: the rate that was set until now, as in ARGV[1]; empty: none
-- Touches all keys of the lock.  See _rate.lua for what it writes.  Owners that hold the lock keep it.

-- include: _parked

local rate, back_ms, ttl_ms, note, pauses
rate, back_ms, ttl_ms, note, home, pauses = unpack(ARGV)
local lock = open_whole(KEYS[1])

local set = rate_set(lock) or {until_ms = 0, most = 0, window = 0}
local before = set.most > 0 and string.format('%.0f/%.0f', set.most, set.window) or ''
local until_ms = back_ms == '' and set.until_ms or now + back_ms
local key, since = lock.name .. RATE, now
local lasts = tonumber(ttl_ms)
if rate == '' then
  rate, lasts = string.format('%.0f/%.0f', set.most, set.window), redis.call('PTTL', key)
  if set.most > 0 then since, note = set.since, note ~= '' and note or set.note end
end
local most, window = string.match(rate, '^(%d+)/(%d+)$')
local held_back = math.max(0, until_ms - now)
if tonumber(most) == 0 then lasts = held_back
elseif lasts > 0 then lasts = math.max(lasts, held_back) end  -- nobody starts until then
if tonumber(most) == 0 and held_back == 0 then
  redis.call('DEL', key)
else
  redis.call('SET', key, string.format('1 %.0f %s %s %.0f ', until_ms, most, window, since) .. note)
  if lasts > 0 then redis.call('PEXPIRE', key, lasts) end
end
lock.rate = nil
if pauses and limit_set(lock) == 0 then
  redis.call('DEL', lock.name .. LIMIT)
  lock.set = false
end
recall_and_hand_off(lock)
return {before, turns}
