-- rate.lua: let a lock be taken more or less often than the code says, or by nobody for some time.
--
-- KEYS[1]   lock
-- ARGV      rate       "most/window_ms": so many starts in any window at most   "0/0": what the code says
--                      holds again   empty: as it is
--           back_ms    > 0: nobody starts for this time   0: they may start at once   empty: as it is
--           ttl_ms     > 0: how long the rate lasts   0: until it is taken back
--           note       text for people
--           home       the caller's broker; left out: it cannot publish
--
-- Returns   {before, turns}   before: the rate that was set until now, as in ARGV[1]; empty: none
-- Touches all keys of the lock.  See _rate.lua for what it writes.  Those who have the lock keep it.

-- include: _parked

local rate, back_ms, ttl_ms, note
rate, back_ms, ttl_ms, note, home = unpack(ARGV)
local lock = open(KEYS[1])
line_exists(lock)  -- or an error, before anything is done
look_at_keys(lock)

local set = rate_set(lock) or {until_ms = 0, most = 0, window = 0}
local before = set.most > 0 and string.format('%.0f/%.0f', set.most, set.window) or ''
local until_ms = back_ms == '' and set.until_ms or now + back_ms
if rate == '' then rate = string.format('%.0f/%.0f', set.most, set.window) end
local most, window = string.match(rate, '^(%d+)/(%d+)$')
local key = lock.name .. RATE
if tonumber(most) == 0 and until_ms <= now then
  redis.call('DEL', key)
else
  redis.call('SET', key, string.format('1 %.0f %s %s %.0f ', until_ms, most, window, now) .. note)
  local lasts = tonumber(most) == 0 and until_ms - now or tonumber(ttl_ms)
  if lasts > 0 then redis.call('PEXPIRE', key, lasts) end
end
lock.rate = nil
recall_and_hand_off(lock)
return {before, turns}
