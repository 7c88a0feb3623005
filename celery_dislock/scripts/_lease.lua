-- _lease.lua: how a lock is written.  Put in front of every other script when it is loaded.
--
-- A lock is <prefix>:{<key>}, a hash with a field per lease:
--
--   owner -> "1 expires_ms token acquired_ms mode holder"
--
--     1            version of this format
--     expires_ms   Redis TIME at which the lease ends
--     token        fencing token, grows with each new lease of the lock
--     acquired_ms  Redis TIME of the acquisition
--     mode         x exclusive, s shared
--     holder       JSON object for messages and tools: task, id, worker, pid, host
--
-- A field whose name begins with "~" is a lease whose owner is done and which only runs out
-- (lock_at_least_for): it still holds the lock, and nobody can renew or release it.
--
-- Beside it, with its name in front of theirs and so in its slot, stand those who wait:
--
--   <lock>:line           sorted set: owner -> when it joined, in Redis TIME in microseconds
--   <lock>:places         hash: owner -> "1 deadline_ms ttl_ms mode limit holder"
--   <lock>:wake:<owner>   list, on which the owner waits for news: "token ttl_ms place_left_ms" when it
--                         was granted the lock, with what was left until its place's deadline;
--                         empty when it has become the first, and is to look who is before it
--
-- Parked tasks stand in the same line, as "<ticket>#", which is no owner's name; see _parked.lua.
--
-- A place whose deadline is over belongs to a waiter that died: it is passed over.  Every key
-- lives as long as the longest of what it holds.  An ended lease that shares its hash with a
-- live one is swept out when the leases are counted.

local RESERVED_MS = 5000  -- for a waiter to take up a lease that it was handed

local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
local now = math.floor(now_us / 1000)

local lock, line, places  -- all that follows is about this lock

local newest  -- highest token known of its leases, also of those that this script has ended

local function use(key)
  lock, line, places = key, key .. ':line', key .. ':places'
  newest = 0
end

-- The lock cannot be used: what is there was written by hand, or by a later version.
local function damaged(what, record)
  local shown = string.gsub(string.sub(record, 1, 60), '[^%w%p ]', '?')
  error('dislock: ' .. what .. ' cannot be read: ' .. shown, 0)
end

local function parse(lease)
  local expires, token, acquired, rest = string.match(lease, '^1 (%d+) (%d+) (%d+) ([xs] .*)$')
  if not expires then damaged('a lease in it', lease) end
  return tonumber(expires), tonumber(token), tonumber(acquired), rest
end

local function write(owner, expires, token, acquired, rest)
  redis.call('HSET', lock, owner,
    string.format('1 %.0f %.0f %.0f %s', expires, token, acquired, rest))
end

local function live_at_least(key, ttl_ms)
  if redis.call('PTTL', key) < ttl_ms then redis.call('PEXPIRE', key, ttl_ms) end
end

-- The owner is done with its lease: end it now, or at acquired + at_least_ms.
local function finish(owner, lease, at_least_ms)
  redis.call('HDEL', lock, owner)
  if at_least_ms == 0 then return end
  local _, token, acquired, rest = parse(lease)
  if acquired + at_least_ms > now then
    write('~' .. owner, acquired + at_least_ms, token, acquired, rest)
    if redis.call('HLEN', lock) == 1 then
      redis.call('PEXPIRE', lock, acquired + at_least_ms - now)
    else
      live_at_least(lock, acquired + at_least_ms - now)
    end
  end
end

-- The live leases: how many of each mode, and which of them ends first.
-- Returns the lease of *owner*, where it is among them.
local counted = {x = 0, s = 0}
local first, first_expires, first_rest = nil, nil, nil

local function count_leases(owner)
  local mine = nil
  counted.x, counted.s, first = 0, 0, nil
  local leases = redis.call('HGETALL', lock)
  for i = 1, #leases, 2 do
    local expires, token, _, rest = parse(leases[i + 1])
    newest = math.max(newest, token)
    if expires <= now then
      redis.call('HDEL', lock, leases[i])
    else
      local mode = string.sub(rest, 1, 1)
      counted[mode] = counted[mode] + 1
      if leases[i] == owner then mine = leases[i + 1] end
      if not first or expires < first_expires then
        first, first_expires, first_rest = leases[i], expires, rest
      end
    end
  end
  return mine
end

local function admits(mode, limit)
  if mode == 's' then return counted.x == 0 end
  return counted.s == 0 and counted.x < limit
end

local function grant(owner, ttl_ms, mode, holder)
  newest = math.max(now_us, newest + 1)
  write(owner, now + ttl_ms, newest, now, mode .. ' ' .. holder)
  if counted.x + counted.s > 0 then live_at_least(lock, ttl_ms)
  else redis.call('PEXPIRE', lock, ttl_ms) end
  counted[mode] = counted[mode] + 1
  return newest
end

-- Of the leases counted, the one that ends first, as a refusal names it; a lock that nobody holds
-- waits for a parked task, whose turn comes again soon.
local function in_the_way()
  if not first then return RESERVED_MS, '', '{"parked":true}' end
  return first_expires - now, first, string.sub(first_rest, 3)
end

local function join_line(owner, place_ms, ttl_ms, mode, limit, holder)
  if not redis.call('ZSCORE', line, owner) then
    local last = redis.call('ZRANGE', line, -1, -1, 'WITHSCORES')[2]
    local joined = math.max(now_us, tonumber(last or 0) + 1)
    redis.call('ZADD', line, string.format('%.0f', joined), owner)
  end
  redis.call('HSET', places, owner,
    string.format('1 %.0f %.0f %s %.0f %s', now + place_ms, ttl_ms, mode, limit, holder))
  live_at_least(line, place_ms)
  live_at_least(places, place_ms)
end

local function leave_line(owner)
  redis.call('DEL', lock .. ':wake:' .. owner)
  redis.call('HDEL', places, owner)
  return redis.call('ZREM', line, owner) == 1
end

local function wake_up(owner, news)
  local wake = lock .. ':wake:' .. owner
  redis.call('RPUSH', wake, news)
  redis.call('PEXPIRE', wake, RESERVED_MS)
end

-- Give the one waiter that is first in line the lock, or pass it over where it is dead.
-- Returns false where the lock does not admit it; whether it was granted, and the token, else.
local function serve(waiter, asker)
  local deadline, ttl, mode, limit, holder = string.match(
    redis.call('HGET', places, waiter) or '', '^1 (%d+) (%d+) (%a) (%d+) (.*)$')
  if not deadline or tonumber(deadline) <= now then
    leave_line(waiter)
    return true
  end
  if not admits(mode, tonumber(limit)) then return false end
  leave_line(waiter)
  if waiter == asker then return true, false, grant(waiter, tonumber(ttl), mode, holder) end
  local reserved = math.min(tonumber(ttl), RESERVED_MS)
  local granted = grant(waiter, reserved, mode, holder)
  wake_up(waiter, string.format('%.0f %.0f %.0f', granted, reserved, deadline - now))
  return true, true
end

local PARKED = string.byte('#')  -- the last character of a parked task in line

-- Gives a parked task its turn; false where it must wait, and so must all behind it.  Set by the
-- scripts whose callers can publish what they are given.
local give_turn

-- Hand the lock to those first in line, as far as it admits them, and wake them; not the asker,
-- who is awake.  Whoever is first after that looks at once: one of those before it may be dead,
-- and its lease end in RESERVED_MS.
-- The leases have been counted.  Returns the asker's token where it got the lock.
local function hand_on(asker)
  local token, handed = nil, false
  while true do
    local head = redis.call('ZRANGE', line, 0, 0)[1]
    if not head then return token end
    local parked = string.byte(head, -1) == PARKED
    local served, woken, granted
    if parked then served = give_turn and give_turn(head, asker)
    else served, woken, granted = serve(head, asker) end
    token, handed = granted or token, handed or woken
    if not served then
      if handed and not parked then wake_up(head, '') end
      return token
    end
  end
end
