-- release.lua: end leases at their owner's wish, or its wait for them, and hand the locks on.
--
-- KEYS      the locks
-- ARGV[1]   owner
-- ARGV[2]   at_least_ms   integer >= 0: hold on until so long after the acquisition
--
-- Returns   how many of the locks the owner held
--
-- Touches no other owner's lease.  A hand-off costs the same however many wait.  Sent twice, the
-- second answers 0.

local owner = ARGV[1]

local function release()
  local lease = redis.call('HGET', lock, owner)
  local expires = lease and tonumber(string.match(lease, '^1 (%d+)'))
  local live = lease and expires > now
  local at_least_ms = live and tonumber(ARGV[2]) or 0  -- what has ended is not revived

  if redis.call('EXISTS', line) == 0 then
    if lease then finish(owner, lease, at_least_ms) end
    if live and expires - now <= RESERVED_MS then  -- perhaps handed over, and never taken up
      redis.call('DEL', lock .. ':wake:' .. owner)
    end
    return live and 1 or 0
  end

  count_leases()
  if lease then finish(owner, lease, at_least_ms) end
  if leave_line(owner) or lease then
    redis.call('DEL', lock .. ':wake:' .. owner)
    count_leases()
    hand_on(nil)
  end
  return live and 1 or 0
end

local released = 0
for _, key in ipairs(KEYS) do
  use(key)
  released = released + release()
end
return released
