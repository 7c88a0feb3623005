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
  local expires, token = 0, 0
  if lease then expires, token = parse(lease) end
  local live = expires > now
  local at_least_ms = live and tonumber(ARGV[2]) or 0  -- what has ended is not revived

  if lease then finish(owner, lease, at_least_ms) end
  if live and expires - now <= RESERVED_MS then  -- perhaps handed over, and never taken up
    redis.call('DEL', lock .. ':wake:' .. owner)
  end
  if redis.call('EXISTS', line) == 1 and (lease or leave_line(owner)) then
    count_leases()
    newest = math.max(newest, token)
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
