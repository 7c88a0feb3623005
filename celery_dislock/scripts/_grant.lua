-- _grant.lua: whom a lock admits.  Included after _lease.lua by the scripts that grant leases.

-- Read the live leases, and sweep out the others; once in a script.  Returns the lock.
local function count_leases(lock)
  if lock.records then return lock end
  lock.records = {}
  local found = redis.call('HGETALL', lock.name)
  for i = 1, #found, 2 do
    local owner, record = found[i], found[i + 1]
    local expires, token, _, mode, holder = parse(record)
    lock.newest = math.max(lock.newest, token)
    if expires <= now then
      redis.call('HDEL', lock.name, owner)
    else
      lock.records[owner] = record
      lock[mode] = lock[mode] + 1
      local first = lock.first
      if not first or expires < first.expires
        or expires == first.expires and token < first.token then
        lock.first = {owner = owner, expires = expires, token = token, holder = holder}
      end
    end
  end
  return lock
end

-- The live leases of owners that begin with *start*.
local function leases_of(lock, start)
  local found = {}
  for owner, record in pairs(count_leases(lock).records) do
    if string.sub(owner, 1, #start) == start then found[#found + 1] = read(owner, record) end
  end
  return found
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

-- Returns the token of the new lease.
local function grant(lock, owner, ttl_ms, mode, holder)
  local token = new_token(lock)
  local alone = lock.x + lock.s == 0
  put(lock, {
    owner = owner, expires = now + ttl_ms, token = token, acquired = now, mode = mode,
    holder = holder,
  })
  if alone then redis.call('PEXPIRE', lock.name, ttl_ms) else live_at_least(lock.name, ttl_ms) end
  return token
end

-- Of the leases in the way, the one that ends first, and of two such the older, as a refusal names it: remaining_ms, owner, holder.
-- A lock that nobody holds waits for a parked task, whose turn comes again soon.
local function in_the_way(lock)
  local first = count_leases(lock).first
  if not first then
    for owner, record in pairs(lock.records) do
      local lease = read(owner, record)
      if not first or lease.expires < first.expires
        or lease.expires == first.expires and lease.token < first.token then first = lease end
    end
    if not first then return RESERVED_MS, '', '{"parked":true}' end
  end
  return first.expires - now, first.owner, first.holder
end
