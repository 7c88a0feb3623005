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

-- include: _record

local owner, at_least_ms, ticket = ARGV[1], tonumber(ARGV[2]), ARGV[4] or ''

-- Whether anyone stands in line, asked as line_exists() does; nil where that cannot be said yet.
local has_line

-- The usual case: a live lease of a lock that nobody waits for ends now.  Returns whether it has.
local function end_alone(lock)
  local seen, there = pcall(redis.call, 'EXISTS', lock .. LINE, lock .. NEVER)
  if not seen then return false end
  has_line = there == 1
  if has_line or ticket ~= '' or at_least_ms > 0 then return false end

  local record = redis.call('HGET', lock, owner)
  local expires = record and string.match(record, '^1 (%d+) %d+ %d+ [xs] ')
  if not expires or expires - now <= RESERVED_MS then return false end
  redis.call('HDEL', lock, owner)
  return true
end

if #KEYS == 1 and end_alone(KEYS[1]) then return 1 end

-- include: _lease

local released, more = 0, {}  -- locks that somebody waits for, or where the ticket is
for _, key in ipairs(KEYS) do
  local lock = open(key)
  local lease = lease_of(lock, owner)
  local live = lease and lease.expires > now

  if lease then finish(lock, lease, live and at_least_ms or 0) end  -- what has ended is not revived
  local in_line = has_line
  if in_line == nil then in_line = line_exists(lock) end
  local claim = ticket ~= '' and redis.call('HGET', lock.name .. RUNNING, ticket)
  local parked = ticket ~= '' and redis.call('HEXISTS', lock.name .. TICKETS, ticket) == 1
  if in_line or claim or parked then
    more[#more + 1] = {
      lock = lock, has_line = in_line, may_wait = not lease, claim = claim, parked = parked,
    }
  end
  if live then
    if lease.expires - now <= RESERVED_MS then  -- perhaps handed over, and never taken up
      redis.call('DEL', lock.name .. WAKE .. owner)
    end
    released = released + 1
  end
end
if #more == 0 then return released end

-- include: _grant
-- include: _line
-- include: _marks
-- include: _parked
-- include: _done

local settles_ms = tonumber(ARGV[5])
home = ARGV[3] or ''

-- The ticket's task has ended.  Returns whether the lock was reserved for it.
local function end_ticket(lock, claim)
  if claim and settles_ms > 0 then
    local joined, claimed = parse_claim(claim)
    write_claim(lock, ticket, joined, claimed, now + settles_ms)
    return false
  end
  local _, was_reserved = forget(lock, ticket)
  mark_done(lock, ticket, DONE_WITH_LOCK)
  return was_reserved
end

for _, found in ipairs(more) do
  local lock = with_parked(found.lock)
  local hands_off = found.has_line
  if hands_off and found.may_wait then leave_line(lock, owner) end
  if found.claim or found.parked then
    hands_off = end_ticket(lock, found.claim) or hands_off  -- parked again, while it still ran
  end
  if hands_off then recall_and_hand_off(lock) end
end
return turns[1] and {released, turns} or released
