-- release_dead.lua: end what a process held or waited for that died while executing a task.
--
-- KEYS      the locks
-- ARGV[1]   start of the owner: all of it but the counter of its acquisition
-- ARGV[2]   at_least_ms   integer >= 0: hold on until this time after the acquisition;
--                         -1: leave its leases to expire, and only its places in line
-- ARGV[3]   home          the caller's broker; left out: it cannot publish
--
-- Returns   how many leases were ended; or {that, turns}
-- Touches all keys of the locks.  The caller has seen that process end.  Sent twice, the second answers 0.
-- While a slot moves, as for release.lua.

-- include: _parked

local start, at_least_ms = ARGV[1], tonumber(ARGV[2])
home = ARGV[3]

local locks, ended = {}, 0
for nth, key in ipairs(KEYS) do
  locks[nth] = open(key)
  look_at_keys(locks[nth])
  limit_set(locks[nth])
end
for _, lock in ipairs(locks) do
  if at_least_ms >= 0 then
    for _, lease in ipairs(leases_of(lock, start)) do
      finish(lock, lease, at_least_ms)
      ended = ended + 1
    end
  end
  line_exists(lock)  -- or an error
  for _, owner in ipairs(redis.call('HKEYS', lock.places)) do
    if string.sub(owner, 1, #start) == start then leave_line(lock, owner) end
  end
  recall_and_hand_off(lock)
end
return turns[1] and {ended, turns} or ended
