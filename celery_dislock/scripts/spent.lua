-- spent.lua: count what the start of an owner has really cost, by the rates of its locks.
--
-- KEYS      the locks
-- ARGV[1]   owner
-- ARGV[2]   spent   integer >= 0: what it has cost in all
-- ARGV[3]   terms   of each lock, or of all, as for acquire.lua
--
-- Returns   how many of the locks the owner holds
-- More than was counted before is counted as a start now, at once.  Less lowers what was counted for this start, and
-- nobody's else; its units of the limit stay.  Who waits is admitted by the release, or comes by itself.
-- Touches the locks and their starts.  Sent twice, the second changes nothing.

-- include: _grant

local owner, spent = ARGV[1], tonumber(ARGV[2])
local held, locks, terms = 0, {}, {}
for word in string.gmatch(ARGV[3], '[^,]+') do terms[#terms + 1] = parse_terms(word) end
for nth, key in ipairs(KEYS) do
  locks[nth] = open(key)
  check_keys(locks[nth], {})
end
for nth, lock in ipairs(locks) do
  local lease, asked = lease_of(lock, owner), terms[nth] or terms[1]
  if lease then
    local mode, units, before = units_of(lease)
    local counted, most = before or units, rate_of(lock, asked)
    held = held + 1
    write_first(lock.name)
    if most and spent > counted then
      local more = {most = asked.most, window = asked.window, cost = spent - counted, has_cost = true}
      count_start(lock, more)
    elseif most and spent < counted then
      local log = starts_of(lock)
      -- The token is the time of the acquisition, or newer.
      local time = math.min(tonumber(lease.token), lease.acquired * 1000 + 999)
      take_back(lock.name, log, math.min(counted, log.most) - math.min(spent, log.most), time)
    end
    if spent ~= counted then
      lease.mode = string.format('%s%s:%.0f', mode, units > 1 and string.format('%.0f', units) or '', spent)
      put(lock, lease)
    end
  end
end
return held
