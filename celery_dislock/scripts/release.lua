-- release.lua: end leases at their owner's wish, or its wait for them, and hand the locks on.
--
-- KEYS      the locks
-- ARGV[1]   owner
-- ARGV[2]   at_least_ms   integer >= 0: hold on until this time after the acquisition
-- ARGV[3]   home          the caller's broker; left out: it cannot publish
-- ARGV[4]   ticket        of a task that may have been parked, and has ended; empty: none
-- ARGV[5]   settles_ms    > 0: its result is on its way for this time   0: it is done
--
-- Touches   beside each lock its line and the owner's wake list; where anyone waits, or with a ticket,
--           all keys of the lock
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
local locks, released = {}, 0
local anyone_in_line = false

for nth, key in ipairs(KEYS) do
  local lock = open(key)
  local lease = lease_of(lock, owner)
  local live = lease and lease.expires > now

  if lease then finish(lock, lease, live and tonumber(ARGV[2]) or 0) end  -- ended ones are not revived
  lock.waited_for = line_exists(lock)
  if lock.waited_for then
    if not lease then leave_line(lock, owner) end
    anyone_in_line = true
  end
  if live then
    if lease.expires - now <= RESERVED_MS then  -- perhaps handed over, and never taken up
      redis.call('DEL', lock.name .. WAKE .. owner)
    end
    released = released + 1
  end
  locks[nth] = lock
end
if ticket == '' and not anyone_in_line then return released end

-- include: _parked

-- Its task has ended: it is done, or its result is on its way.
local function end_ticket(lock)
  local claim = redis.call('HGET', lock.running, ticket)
  local settles_ms = tonumber(ARGV[5])
  if claim and settles_ms > 0 then
    local joined, claimed = parse_claim(claim)
    write_claim(lock, ticket, joined, claimed, now + settles_ms)
  elseif claim or redis.call('HEXISTS', lock.tickets, ticket) == 1 then
    local _, was_reserved = forget(lock, ticket)
    if was_reserved then lock.waited_for = true end  -- it was parked again, while it still ran
    mark_done(lock, ticket, DONE_WITH_LOCK)
  end
end

home = ARGV[3] or ''
for _, lock in ipairs(locks) do
  with_parked(lock)
  if ticket ~= '' then end_ticket(lock) end
  if lock.waited_for then recall_and_hand_off(lock) end
end
return turns[1] and {released, turns} or released
