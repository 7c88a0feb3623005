-- _lease.lua: how a lock and its leases are read and changed.  Included by all scripts that do so; what a
-- record has in it stands in _record.lua.
--
-- A field whose name begins with "~" is a lease whose owner is done and which only runs out
-- (lock_at_least_for): it still holds the lock, and nobody can renew or release it.
--
-- Every key lives as long as the longest of what it holds.  An ended lease that shares its hash with a
-- live one is swept out when the leases are counted.
--
-- A cluster moves a slot key by key, so that the lock and what stands beside it may be on two nodes,
-- and a key that is missing may be on the other one.  A lease is safe meanwhile: the lock is KEYS[1],
-- and the client is sent to the node that has it.  Nothing else is read or written before
-- line_exists() has seen that all keys are here.

-- What a script knows of a lock:
--
--   name, line, places   its keys
--   newest               highest token that this script has seen, also of leases that have ended
--   records              owner -> record of each live lease; false: not counted yet
--   x, s                 how many of them there are of each mode
--   first                the one that ends first; false: not known
--
-- put() and drop() alone change leases, and they keep this true.  Functions that decide by it count the
-- leases first, unless that was done; see _grant.lua.  So no script has to remember when to count.
local function open(name)
  return {
    name = name, line = name .. LINE, places = name .. PLACES,
    newest = 0, records = false, x = 0, s = 0, first = false,
  }
end

-- Whether anyone stands in line.  Asks for a second name, which is never there: where the slot moves,
-- a server that misses one of two keys answers with an error, and the client asks again.
local function line_exists(lock)
  return redis.call('EXISTS', lock.line, lock.name .. NEVER) == 1
end

-- Returns expires_ms, token, acquired_ms, mode, holder.  Where a record cannot be read, the lock cannot
-- be used: it was written by hand, or by a later version.
local function parse(record)
  local expires, token, acquired, mode, holder =
    string.match(record, '^1 (%d+) (%d+) (%d+) ([xs]) (.*)$')
  if not expires or #expires > TIME_DIGITS or #token > TOKEN_DIGITS or #acquired > TIME_DIGITS then
    local shown = string.gsub(string.sub(record, 1, 60), '[^%w%p ]', '?')
    error('dislock: a lease in it cannot be read: ' .. shown, 0)
  end
  return tonumber(expires), tonumber(token), tonumber(acquired), mode, holder
end

local function read(owner, record)
  local expires, token, acquired, mode, holder = parse(record)
  return {
    owner = owner, expires = expires, token = token, acquired = acquired, mode = mode,
    holder = holder,
  }
end

-- The lease of an owner, or nothing.  Unless the leases were counted, it may have ended.
local function lease_of(lock, owner)
  local record
  if lock.records then record = lock.records[owner]
  else record = redis.call('HGET', lock.name, owner) end
  return record and read(owner, record) or nil
end

local function record_of(expires, token, acquired, mode, holder)
  return string.format('1 %.0f %.0f %.0f %s %s', expires, token, acquired, mode, holder)
end

-- A server without memory refuses a script whose first write may take some, and no write after another.
-- So what only goes on with a lease, or ends one, begins with a write that changes nothing.
local function write_first(name)
  redis.call('HDEL', name, NEVER)
end

-- Write a live lease.  The caller sees to the expiry of the hash.
local function put(lock, lease)
  local record = record_of(lease.expires, lease.token, lease.acquired, lease.mode, lease.holder)
  redis.call('HSET', lock.name, lease.owner, record)
  lock.newest = math.max(lock.newest, lease.token)
  if not lock.records then return end
  local before = lock.records[lease.owner]
  if before then
    local mode = string.match(before, '[xs]')  -- the first letter of a record
    lock[mode] = lock[mode] - 1
  end
  lock.records[lease.owner] = record
  lock[lease.mode] = lock[lease.mode] + 1
  lock.first = false
end

-- Take a lease away.
local function drop(lock, lease)
  redis.call('HDEL', lock.name, lease.owner)
  lock.newest = math.max(lock.newest, lease.token)
  if not (lock.records and lock.records[lease.owner]) then return end
  lock.records[lease.owner] = nil
  lock[lease.mode] = lock[lease.mode] - 1
  lock.first = false
end

local function renew(lock, lease, ttl_ms)
  lease.expires = now + ttl_ms
  write_first(lock.name)
  put(lock, lease)
  live_at_least(lock.name, ttl_ms)
end

-- The owner is done with its lease: end it now, or at acquired + at_least_ms.
local function finish(lock, lease, at_least_ms)
  local ends = lease.acquired + at_least_ms
  local runs_out = at_least_ms > 0 and ends > now
  if runs_out then
    write_first(lock.name)
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
