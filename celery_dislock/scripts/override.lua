-- override.lua: set something for a lock in place of what its code says, or take that back.
--
-- KEYS[1]   lock
-- ARGV      broker   the caller's broker; empty: it cannot publish
--           ttl_ms   > 0: how long it lasts   0: until it is taken back
--           note     text for people, in one line
--           name, value, ...   as in _override.lua; an empty value takes it back
--
-- Returns   {before, turns}   before: all that was set until now, as show_overrides() returns it
-- Touches all keys of the lock.  A record that cannot be read is replaced.  Owners that hold the lock keep it.  Owners
-- that wait stay in line, and are admitted by what is set now.

-- include: _parked
-- include: _shown

local ttl_ms, note
broker, ttl_ms, note = unpack(ARGV)
local lock = open(KEYS[1])
opened[KEYS[1]] = lock
line_exists(lock)  -- or an error, before anything is done
if not pcall(overrides, lock) then lock.set = {} end
check_all_keys(lock)

local before, ends = show_overrides(lock), now + ttl_ms
for i = 4, #ARGV, 2 do
  local name, value = ARGV[i], ARGV[i + 1]
  lock.set[name] = value ~= '' and {
    name = name, value = value, since = now, until_ms = ttl_ms == '0' and 0 or ends, note = note,
  } or nil
  -- An operator's pause with an end takes back one without an end.
  if name == 'pause' and value ~= '' and limit_set(lock) == 0 then lock.set.limit = nil end
end
local lines, key = {}, lock.name .. LIMIT
for _, set in pairs(lock.set) do  -- format() ends at a NUL, which a note may have
  lines[#lines + 1] = string.format('2 %s %s %.0f %.0f ', set.name, set.value, set.since, set.until_ms) .. set.note
  ends = ends and set.until_ms > 0 and math.max(ends, set.until_ms)
end
redis.call('DEL', key)  -- of any type
if lines[1] then redis.call('SET', key, table.concat(lines, '\n')) end
if lines[1] and ends then redis.call('PEXPIRE', key, ends - now) end
lock.set = nil
recall_and_hand_off(lock)
return {before, turns}
