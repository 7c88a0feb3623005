-- release.lua: end leases at their owner's wish, or its wait for them, and hand the locks on.
--
-- KEYS      the locks
-- ARGV[1]   owner
-- ARGV[2]   at_least_ms   integer >= 0: hold on until so long after the acquisition
-- ARGV[3]   home          the caller's broker; left out: it cannot publish
-- ARGV[4]   ticket        of a task that may have been parked, and has ended; empty: none
-- ARGV[5]   settles_ms    > 0: its result is on its way for so long   0: it is done
--
-- Returns   how many of the locks the owner held
--           {that, turns}   turns: {lock, ticket, message, ...}, to be published
--
-- Touches no other owner's lease.  A hand-off costs the same however many wait.  Sent twice, the
-- second answers 0.
--
-- While a slot moves the leases are ended, and what follows is an error: sent again, it does the rest.

-- include: _lease

local owner, ticket = ARGV[1], ARGV[4] or ''
local waited_for = {}  -- locks, and the token that was released

local released = 0
for _, key in ipairs(KEYS) do
  use(key)
  local lease = redis.call('HGET', lock, owner)
  local expires, token = 0, 0
  if lease then expires, token = parse(lease) end
  local live = expires > now
  local at_least_ms = live and tonumber(ARGV[2]) or 0  -- what has ended is not revived

  if lease then finish(owner, lease, at_least_ms) end
  if line_exists() then
    if not lease then leave_line(owner) end
    waited_for[key] = token
  end
  if live and expires - now <= RESERVED_MS then  -- perhaps handed over, and never taken up
    redis.call('DEL', lock .. ':wake:' .. owner)
  end
  if live then released = released + 1 end
end
if ticket == '' and not next(waited_for) then return released end

-- include: _parked

home = ARGV[3] or ''
for _, key in ipairs(KEYS) do
  use_parked(key)
  local ran = ticket ~= '' and redis.call('HGET', running, ticket)
  if ran and tonumber(ARGV[5]) > 0 then
    local joined, claimed = parse_claim(ran)
    write_claim(ticket, joined, claimed, now + ARGV[5])
  elseif ran or ticket ~= '' and redis.call('HEXISTS', tickets, ticket) == 1 then
    if redis.call('HEXISTS', lock, ticket .. '#') == 1 then  -- parked again, while it still ran
      waited_for[key] = waited_for[key] or 0
    end
    forget(ticket)
    mark_done(ticket)
  end
  if waited_for[key] then
    count_leases()
    newest = math.max(newest, waited_for[key])
    pass_on()
  end
end
return turns[1] and {released, turns} or released
