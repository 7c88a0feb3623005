-- _lease.lua: how a lock is written.  Included by all scripts that read or write leases.
--
-- The lock is a hash with a field per lease:
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
-- Beside it stand those who wait, in <lock>:line; what they wait for, in <lock>:places:
--
--   owner -> "1 deadline_ms ttl_ms mode limit holder"
--
-- Each has a list <lock>:wake:<owner>, on which it waits for news: "token ttl_ms place_left_ms" when it
-- was granted the lock, with the time that was left until its place's deadline; empty when it has
-- become the first, and has to look who is before it.
--
-- Parked tasks stand in the same line, as "<ticket>#", which is no owner's name; see _parked.lua.
--
-- A place whose deadline is over belongs to a waiter that died: it is passed over.  Every key
-- lives as long as the longest of what it holds.  An ended lease that shares its hash with a
-- live one is swept out when the leases are counted.

-- A cluster moves a slot key by key, so that the lock and what stands beside it may be on two nodes,
-- and a key that is missing may be on the other one.  A lease is safe meanwhile: the lock is KEYS[1],
-- and the client is sent to the node that has it.  Nothing else is read or written before
-- line_exists() has seen that all keys are here.

-- include: _names

local RESERVED_MS = 5000  -- for a waiter to take up a lease that it was handed

local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
local now = math.floor(now_us / 1000)

-- What a script knows of a lock:
--
--   name, line, places   its keys
--   newest               highest token that this script has seen, also of leases that have ended
--   records              owner -> record of each live lease; false: not counted yet
--   x, s                 how many live leases there are of each mode
--   first                the live lease that ends first; false: not known
--
-- put() and drop() alone change leases, and they keep this true.  Functions that decide by it count the
-- leases first, unless that was done.  So no script has to remember when to count.
local function open(name)
  return {
    name = name, line = name .. LINE, places = name .. PLACES,
    newest = 0, records = false, x = 0, s = 0, first = false,
  }
end

-- The lock cannot be used: what is there was written by hand, or by a later version.
local function damaged(what, record)
  local shown = string.gsub(string.sub(record, 1, 60), '[^%w%p ]', '?')
  error('dislock: ' .. what .. ' cannot be read: ' .. shown, 0)
end

-- Whether anyone stands in line.  Asks for a second name, which is never there: where the slot moves,
-- a server that misses one of two keys answers with an error, and the client asks again.
local function line_exists(lock)
  return redis.call('EXISTS', lock.line, lock.name .. NEVER) == 1
end

local function live_at_least(key, ttl_ms)
  if redis.call('PTTL', key) < ttl_ms then redis.call('PEXPIRE', key, ttl_ms) end
end

-- Returns expires_ms, token, acquired_ms, mode, holder.
local function parse(record)
  local expires, token, acquired, mode, holder =
    string.match(record, '^1 (%d+) (%d+) (%d+) ([xs]) (.*)$')
  if not expires then damaged('a lease in it', record) end
  return tonumber(expires), tonumber(token), tonumber(acquired), mode, holder
end

local function read(owner, record)
  local expires, token, acquired, mode, holder = parse(record)
  return {
    owner = owner, expires = expires, token = token, acquired = acquired, mode = mode,
    holder = holder,
  }
end

-- Count a live lease, or one less.
local function enter(lock, owner, record, expires, mode)
  lock.records[owner] = record
  lock[mode] = lock[mode] + 1
  if lock.first and expires < lock.first.expires then lock.first = read(owner, record) end
end

local function strike_out(lock, owner)
  local _, _, _, mode = parse(lock.records[owner])
  lock.records[owner] = nil
  lock[mode] = lock[mode] - 1
  if lock.first and lock.first.owner == owner then lock.first = false end
end

-- Read the live leases, once in a script.  Returns the lock.
local function count_leases(lock)
  if lock.records then return lock end
  lock.records = {}
  local found = redis.call('HGETALL', lock.name)
  for i = 1, #found, 2 do
    local expires, token, _, mode = parse(found[i + 1])
    lock.newest = math.max(lock.newest, token)
    if expires <= now then
      redis.call('HDEL', lock.name, found[i])
    else
      if not lock.first then lock.first = read(found[i], found[i + 1]) end
      enter(lock, found[i], found[i + 1], expires, mode)
    end
  end
  return lock
end

-- The lease of an owner; it may have ended, unless the leases were counted.  Nothing where there is none.
local function lease_of(lock, owner)
  local record
  if lock.records then record = lock.records[owner]
  else record = redis.call('HGET', lock.name, owner) end
  return record and read(owner, record)
end

-- The live leases of owners that begin with *start*.
local function leases_of(lock, start)
  local found = {}
  for owner, record in pairs(count_leases(lock).records) do
    if string.sub(owner, 1, #start) == start then found[#found + 1] = read(owner, record) end
  end
  return found
end

-- The live lease that ends first; nothing where there is none.
local function first_lease(lock)
  count_leases(lock)
  if not lock.first then
    for owner, record in pairs(lock.records) do
      local lease, first = read(owner, record), lock.first
      if not first or lease.expires < first.expires
        or lease.expires == first.expires and lease.token < first.token then lock.first = lease end
    end
  end
  return lock.first
end

local function held(lock)
  count_leases(lock)
  return lock.x + lock.s > 0
end

-- Write a lease that is live.  The caller sees to the expiry of the hash.
local function put(lock, lease)
  local record = string.format('1 %.0f %.0f %.0f %s %s',
    lease.expires, lease.token, lease.acquired, lease.mode, lease.holder)
  redis.call('HSET', lock.name, lease.owner, record)
  lock.newest = math.max(lock.newest, lease.token)
  if not lock.records then return end
  if lock.records[lease.owner] then strike_out(lock, lease.owner) end
  enter(lock, lease.owner, record, lease.expires, lease.mode)
end

-- Take a lease away.  The token of the next one will be higher.
local function drop(lock, lease)
  redis.call('HDEL', lock.name, lease.owner)
  lock.newest = math.max(lock.newest, lease.token)
  if lock.records and lock.records[lease.owner] then strike_out(lock, lease.owner) end
end

local function renew(lock, lease, ttl_ms)
  lease.expires = now + ttl_ms
  put(lock, lease)
  live_at_least(lock.name, ttl_ms)
end

-- The owner is done with its lease: end it now, or at acquired + at_least_ms.
local function finish(lock, lease, at_least_ms)
  local ends = lease.acquired + at_least_ms
  local runs_out = at_least_ms > 0 and ends > now
  if runs_out then
    put(lock, {
      owner = '~' .. lease.owner, expires = ends, token = lease.token, acquired = lease.acquired,
      mode = lease.mode, holder = lease.holder,
    })
  end
  drop(lock, lease)  -- last: a hash that is empty may move away, or loses its expiry
  if not runs_out then return end
  if redis.call('HLEN', lock.name) == 1 then
    redis.call('PEXPIRE', lock.name, ends - now)
  else
    live_at_least(lock.name, ends - now)
  end
end

local function admits(lock, mode, limit)
  count_leases(lock)
  if mode == 's' then return lock.x == 0 end
  return lock.s == 0 and lock.x < limit
end

-- Returns a token higher than all that this script has seen of the lock.
local function new_token(lock)
  count_leases(lock)
  return math.max(now_us, lock.newest + 1)
end

local function grant(lock, owner, ttl_ms, mode, holder)
  local token, alone = new_token(lock), not held(lock)
  put(lock, {
    owner = owner, expires = now + ttl_ms, token = token, acquired = now, mode = mode,
    holder = holder,
  })
  if alone then redis.call('PEXPIRE', lock.name, ttl_ms) else live_at_least(lock.name, ttl_ms) end
  return token
end

-- Of the leases in the way, the one that ends first, as a refusal names it: remaining_ms, owner, holder.
-- A lock that nobody holds waits for a parked task, whose turn comes again soon.
local function in_the_way(lock)
  local lease = first_lease(lock)
  if not lease then return RESERVED_MS, '', '{"parked":true}' end
  return lease.expires - now, lease.owner, lease.holder
end

-- When the next in line joins: after all that are there, also where the clock was set back.
local function joins_at(lock)
  local last = redis.call('ZRANGE', lock.line, -1, -1, 'WITHSCORES')[2]
  return math.max(now_us, tonumber(last or 0) + 1)
end

local function join_line(lock, owner, place_ms, ttl_ms, mode, limit, holder)
  if not redis.call('ZSCORE', lock.line, owner) then
    redis.call('ZADD', lock.line, string.format('%.0f', joins_at(lock)), owner)
  end
  redis.call('HSET', lock.places, owner,
    string.format('1 %.0f %.0f %s %.0f %s', now + place_ms, ttl_ms, mode, limit, holder))
  live_at_least(lock.line, place_ms)
  live_at_least(lock.places, place_ms)
end

local function leave_line(lock, owner)
  redis.call('DEL', lock.name .. WAKE .. owner)
  redis.call('HDEL', lock.places, owner)
  redis.call('ZREM', lock.line, owner)
end

local function wake_up(lock, owner, news)
  local wake = lock.name .. WAKE .. owner
  redis.call('RPUSH', wake, news)
  redis.call('PEXPIRE', wake, RESERVED_MS)
end

-- Give the one waiter that is first in line the lock, or pass it over where it is dead.
-- Returns false where the lock does not admit it; else true, whether it was woken, and the asker's token.
local function serve(lock, waiter, asker)
  local deadline, ttl, mode, limit, holder = string.match(
    redis.call('HGET', lock.places, waiter) or '', '^1 (%d+) (%d+) (%a) (%d+) (.*)$')
  if not deadline or tonumber(deadline) <= now then
    leave_line(lock, waiter)
    return true
  end
  if not admits(lock, mode, tonumber(limit)) then return false end
  leave_line(lock, waiter)
  if waiter == asker then return true, false, grant(lock, waiter, tonumber(ttl), mode, holder) end
  local reserved = math.min(tonumber(ttl), RESERVED_MS)
  local token = grant(lock, waiter, reserved, mode, holder)
  wake_up(lock, waiter, string.format('%.0f %.0f %.0f', token, reserved, deadline - now))
  return true, true
end

local TICKET_ENDS = string.byte('#')

local function is_parked(member)  -- of a line
  return string.byte(member, -1) == TICKET_ENDS
end

-- Gives a parked task its turn; false where it must wait, and so must all behind it.  Set by
-- _parked.lua, for scripts whose callers can publish what they are given.
local give_turn

-- Hand the lock to those first in line, as far as it admits them, and wake them; not the asker,
-- who is awake.  Whoever is first after that looks at once: one of those before it may be dead,
-- and its lease end in RESERVED_MS.
-- Returns the asker's token where it got the lock.
local function hand_off(lock, asker)
  local token, handed = nil, false
  while true do
    local head = redis.call('ZRANGE', lock.line, 0, 0)[1]
    if not head then return token end
    local parked = is_parked(head)
    local served, woken, granted
    if parked then served = give_turn and give_turn(lock, head, asker)
    else served, woken, granted = serve(lock, head, asker) end
    token, handed = granted or token, handed or woken
    if not served then
      if handed and not parked then wake_up(lock, head, '') end
      return token
    end
  end
end
