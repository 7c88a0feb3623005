-- limit.lua: admit another number of leases than the code says, or take that back.
--
-- KEYS[1]   lock
-- ARGV      limit    integer >= 0: exclusive leases at a time; 0: nobody is admitted, shared leases
--                    neither   empty: what the code says holds again
--           ttl_ms   > 0: how long that lasts   0: until it is taken back
--           note     text for people
--           home     the caller's broker; left out: it cannot publish
--
-- Returns   {before, turns}   before: the limit that was set until now; empty: none
-- Touches all keys of the lock.  <lock>:limit is "1 limit since_ms note".  It has no expiry unless one is
-- given: tasks that an operator has stopped must not run because some days have passed.
-- Owners that hold the lock keep it.  Owners that wait stay in line, and are admitted by the new limit.

-- include: _parked

local limit, ttl_ms, note
limit, ttl_ms, note, home = unpack(ARGV)
local lock = open(KEYS[1])
opened[KEYS[1]] = lock
line_exists(lock)  -- or an error, before anything is done
check_all_keys(lock)

local key = lock.name .. LIMIT
local before = string.match(redis.call('GET', key) or '', '^%d+ (%d+) ') or ''
if limit == '' then
  redis.call('DEL', key)
else
  redis.call('SET', key, string.format('1 %s %.0f ', limit, now) .. note)  -- format() ends at a NUL
  if tonumber(ttl_ms) > 0 then redis.call('PEXPIRE', key, ttl_ms) end
end
recall_and_hand_off(lock)
return {before, turns}
