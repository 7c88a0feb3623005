-- release.lua: end leases at their owner's wish, or its wait for them, and hand the locks on.
--
-- KEYS      the locks
-- ARGV[1]   owner
-- ARGV[2]   at_least_ms   integer >= 0: hold on until so long after the acquisition
-- ARGV[3]   home          the caller's broker; left out: it cannot publish
-- ARGV[4]   ticket        of a task that may have been parked, and is done; empty: none
--
-- Returns   how many of the locks the owner held
--           {that, turns}   turns: {lock, ticket, message, ...}, to be published
--
-- Touches no other owner's lease.  A hand-off costs the same however many wait.  Sent twice, the
-- second answers 0.

local owner, ticket = ARGV[1], ARGV[4] or ''
home = ARGV[3] or ''

local function finish_ticket()
  if redis.call('HDEL', running, ticket) == 1 or drop_ticket(ticket) then
    forget(ticket)
    redis.call('SET', lock .. ':done:' .. ticket, 1, 'PX', DONE_MS)
  end
end

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
  if ticket ~= '' then finish_ticket() end
  if redis.call('EXISTS', line) == 1 and (lease or leave_line(owner)) then
    count_leases()
    newest = math.max(newest, token)
    pass_on()
  end
  return live and 1 or 0
end

local released = 0
for _, key in ipairs(KEYS) do
  use_parked(key)
  released = released + release()
end
return turns[1] and {released, turns} or released
