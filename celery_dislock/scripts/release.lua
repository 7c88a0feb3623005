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

local has_line  -- whether anyone stands in line; nil where that is not known yet

-- What the owner was told, if it was handed the lease and perhaps has not read it.
local function forget_news(lock, expires)
  if expires - now <= RESERVED_MS then redis.call('DEL', lock .. WAKE .. owner) end
end

-- The usual case: a live lease of a lock that nobody waits for ends now.  Returns whether it has.
local function end_alone(lock)
  local record = redis.call('HGET', lock, owner)
  local expires = record and string.match(record, '^1 (%d+) %d+ %d+ [xs] ')
  if not expires or tonumber(expires) <= now then return false end
  redis.call('HDEL', lock, owner)
  forget_news(lock, expires)
  return true
end

-- The usual hand-off: the only lease of a lock ends, and a live waiter is first in line, which wants the
-- lock for itself, as does the one after it.  Does what hand_off() does.  Returns whether it has.
local function hand_over(lock)
  local leases = redis.call('HGETALL', lock)
  if #leases ~= 2 or leases[1] ~= owner then return false end
  local expires, token = string.match(leases[2], '^1 (%d+) (%d+) %d+ [xs] ')
  if not expires or tonumber(expires) <= now or #token > TOKEN_DIGITS then return false end

  -- If a key is of the wrong type, the lease ends all the same, and what comes after the includes says so.
  local line, places, wake = lock .. LINE, lock .. PLACES, lock .. WAKE
  local is_line, first_two = pcall(redis.call, 'ZRANGE', line, 0, 1)
  local head, next_one = first_two[1], first_two[2]
  if not (is_line and head) then return false end
  local are_places, place = pcall(redis.call, 'HGET', places, head)
  if not (are_places and place) then return false end
  local deadline, ttl, holder = string.match(place, '^1 (%d+) (%d+) x 1 (.*)$')
  if not deadline or tonumber(deadline) <= now then return false end
  if next_one then
    local kept_until = string.match(redis.call('HGET', places, next_one) or '', '^1 (%d+) %d+ x 1 ')
    if not kept_until or tonumber(kept_until) <= now then return false end
  end

  -- The first write is one that a server without memory carries out; it refuses none after that.
  redis.call('HDEL', lock, owner)
  redis.call('HDEL', places, head)
  redis.call('ZREM', line, head)
  redis.call('DEL', wake .. head, wake .. owner)  -- see forget_news()
  local reserved = math.min(ttl, RESERVED_MS)
  if tonumber(token) < now_us then token = time_as_token()
  else token = string.format('%.0f', token + 1) end
  redis.call('HSET', lock, head, table.concat({'1', now + reserved, token, now, 'x', holder}, ' '))
  redis.call('PEXPIRE', lock, reserved)
  -- The server writes first to the client that is served last: the one that has the lock.
  if next_one then
    pcall(redis.call, 'RPUSH', wake .. next_one, '')
    redis.call('PEXPIRE', wake .. next_one, RESERVED_MS)
  end
  redis.call('RPUSH', wake .. head, table.concat({token, reserved, deadline - now}, ' '))
  redis.call('PEXPIRE', wake .. head, RESERVED_MS)
  return true
end

if #KEYS == 1 then
  local lock = KEYS[1]
  local seen, there =
    pcall(redis.call, 'EXISTS', lock .. LINE, lock .. NEVER, lock .. HANDED, lock .. LIMIT)
  if seen then
    if there == 0 then has_line = false end
    if ticket == '' and at_least_ms <= 0 then
      if there == 0 and end_alone(lock) or there == 1 and hand_over(lock) then return 1 end
    end
  end
end

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
    forget_news(lock.name, lease.expires)
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
  write_first(lock.name)
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
