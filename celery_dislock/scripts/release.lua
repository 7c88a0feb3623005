-- release.lua: end an owner's leases, and its places in line, as it asks for, and hand the locks on.
--
-- KEYS      the locks
-- ARGV[1]   owner
-- ARGV[2]   at_least_ms   integer >= 0: hold on until this time after the acquisition
-- ARGV[3]   broker        the caller's broker; left out: it cannot publish
-- ARGV[4]   ticket        of a task that may have been parked, and has ended; empty: none
-- ARGV[5]   settles_ms    > 0: its result is on its way for this time   0: it is done   < 0: its message is
--                         rejected, and may come back, so no mark says that it is done
--
-- Returns   how many of the locks the owner held; or {that, turns}
-- Touches beside each lock its line and the owner's wake list; if anyone waits, or with a ticket, all keys
-- of the lock; and no other owner's lease.  A hand-off costs the same however many wait.  Sent twice, the
-- second answers 0.  While a slot moves, the leases are ended and the script answers with an error: sent again, it
-- does the rest.

-- include: _record

local owner, at_least_ms, ticket = ARGV[1], tonumber(ARGV[2]), ARGV[4] or ''

-- Delete the news of a hand-off that the owner may not have read: its lease is still as short as it was handed over.
local function forget_news(lock, ends)
  if ends - now <= TAKE_UP_MS then redis.call('DEL', lock .. WAKE .. owner) end
end

-- The usual cases are answered before the rest is defined.  The first case: one lease ends now, and nobody waits.
local name, record = KEYS[1]
if #KEYS == 1 and ticket == '' and at_least_ms <= 0 then
  local seen, others = pcall(redis.call, 'EXISTS', name .. LINE, name .. NEVER, name .. HANDED, name .. LIMIT)
  record = seen and others <= 1 and redis.call('HGET', name, owner)
  local ends = others == 0 and ends_at(record)
  if ends and ends > now then
    redis.call('HDEL', name, owner)
    forget_news(name, ends)
    return 1
  end
end

-- include: _place

-- The place of a waiter that wants the lock for itself; nothing if the waiter is dead, or has other terms.
local function place_alone(lock, waiter)
  local seen, record = pcall(redis.call, 'HGET', lock .. PLACES, waiter)
  local place = seen and record and read_place(record)
  return place and are_alone(place.terms) and place
end

-- The usual hand-off: the only lease of a lock ends, and the first two in line each want the lock for themselves.
-- Does what hand_off() does.  Returns false, and changes nothing, in any other case.
local function hand_over(lock, lease)
  local seen, two = pcall(redis.call, 'ZRANGE', lock .. LINE, 0, 1)
  local first, second = two[1], two[2]
  if not seen or not first or redis.call('HLEN', lock) ~= 1 then return false end
  local place = place_alone(lock, first)
  if not place or second and not place_alone(lock, second) then return false end

  redis.call('HDEL', lock, owner)  -- a server without memory refuses other writes as the first of a script
  redis.call('HDEL', lock .. PLACES, first)
  redis.call('ZREM', lock .. LINE, first)
  redis.call('DEL', lock .. WAKE .. first, lock .. WAKE .. owner)  -- see forget_news()
  local take_up = math.min(place.ttl, TAKE_UP_MS)
  local token = tonumber(lease.token) < now_us and now_as_token or string.format('%.0f', lease.token + 1)
  write(lock, first, now + take_up, token, now, 'x', place.holder, place.version)
  redis.call('PEXPIRE', lock, take_up)
  -- The server writes first to the client that is served last.  That must be the one that was handed the lock.
  local woken = {{first, table.concat({token, take_up, place.deadline - now}, ' ')}}
  if second then table.insert(woken, 1, {second, ''}) end
  for _, one in ipairs(woken) do
    pcall(redis.call, 'RPUSH', lock .. WAKE .. one[1], one[2])
    redis.call('PEXPIRE', lock .. WAKE .. one[1], TAKE_UP_MS)
  end
  return true
end

local lease = record and read(owner, record)
if lease and lease.expires > now and hand_over(name, lease) then return 1 end

-- include: _lease

local released, more = 0, {}  -- more: the locks that somebody waits for, or beside which the ticket is
for _, key in ipairs(KEYS) do
  local lock = open(key)
  local lease = lease_of(lock, owner)
  local live = lease and lease.expires > now

  if lease then finish(lock, lease, live and at_least_ms or 0) end  -- a lease that has ended is not revived
  local has_line = line_exists(lock)
  local claim = ticket ~= '' and redis.call('HGET', lock.running, ticket)
  local parked = ticket ~= '' and redis.call('HEXISTS', lock.tickets, ticket) == 1
  if has_line or claim or parked then
    local took_ms = live and math.max(now - lease.acquired, at_least_ms)
    more[#more + 1] =
      {lock = lock, has_line = has_line, may_wait = not lease, claim = claim, parked = parked, took_ms = took_ms}
  end
  if live then
    forget_news(lock.name, lease.expires)
    released = released + 1
  end
end
if #more == 0 then return released end

-- include: _parked
-- include: _lasted

local settles_ms = tonumber(ARGV[5])
broker = ARGV[3]

for _, found in ipairs(more) do opened[found.lock.name] = found.lock end
for _, found in ipairs(more) do
  local lock, claim, hands_off = found.lock, found.claim, found.has_line
  if hands_off and found.may_wait then leave_line(lock, owner) end
  if claim or found.parked then write_first(lock.name) end
  if claim and settles_ms > 0 then
    local settling = parse_claim(claim)
    settling.settles = now + settles_ms
    write_claim(lock, ticket, settling)
  elseif claim or found.parked then
    forget(lock, ticket)
    if settles_ms >= 0 then mark_done(lock, ticket) end
  end
  if hands_off and found.took_ms then note_lasted(lock, found.took_ms) end
  if hands_off then recall_and_hand_off(lock) end
end
hand_on_all()
return turns[1] and {released, turns} or released
