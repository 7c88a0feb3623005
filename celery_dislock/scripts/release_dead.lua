-- release_dead.lua: end the leases and the places in line of a process that died while executing a task.
--
-- KEYS      the locks
-- ARGV[1]   start of the owner: all of it but the counter of its acquisition
-- ARGV[2]   at_least_ms   integer >= 0: hold on until this time after the acquisition;
--                         -1: leave its leases to expire, and end only its places in line
-- ARGV[3]   broker        the caller's broker; left out: it cannot publish
-- ARGV[4]   ticket        of its task; if the task was parked, the locks that the ticket names are released, too
-- ARGV[5]   settles_ms    as for release.lua: the claim of that ticket ends; empty: its message may come again
--
-- Returns   how many leases were ended; or {that, turns}
-- Touches all keys of the locks.  The caller has seen that process end.  Sent twice, the second answers 0.
-- While a slot moves, the same holds as for release.lua.

-- include: _parked

local start, at_least_ms, ticket, settles_ms = ARGV[1], tonumber(ARGV[2]), ARGV[4], tonumber(ARGV[5])
broker = ARGV[3]

local locks, ended = {}, 0

-- Whether another delivery of the task has the claim: it runs, and this one was put off, or was about to be.
local function is_of_another(lock)
  for _, lease in ipairs(leases_of(lock, id_of(ticket) .. '@')) do
    if string.sub(lease.owner, 1, #start) ~= start then return true end
  end
end

local function add(key)
  if opened[key] then return end
  local lock = open(key)
  locks[#locks + 1], opened[key] = lock, lock
  check_all_keys(lock)
  limit_set(lock)
  local claim = ticket and redis.call('HGET', lock.running, ticket)
  for _, station in ipairs(claim and parse_claim(claim).stations or {}) do add(station.name or key) end
end

for _, key in ipairs(KEYS) do add(key) end
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
  if settles_ms and redis.call('HEXISTS', lock.running, ticket) == 1 and not is_of_another(lock) then
    forget(lock, ticket)
    if settles_ms >= 0 then mark_done(lock, ticket) end
  end
  recall_and_hand_off(lock)
end
return turns[1] and {ended, turns} or ended
