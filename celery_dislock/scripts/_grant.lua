-- _grant.lua: whom a lock admits.

-- include: _lease
-- include: _rate

-- Read the live leases, and delete those that have ended; once in a script.  Returns the lock.
local function count_leases(lock)
  if lock.leases then return lock end
  local found, leases, ended = redis.call('HGETALL', lock.name), {}, {}
  for i = 1, #found, 2 do
    local lease = read(found[i], found[i + 1])
    lock.newest = math.max(lock.newest, tonumber(lease.token))
    if lease.expires > now then
      leases[lease.owner] = lease
      take_room(lock, lease, 1)
    else
      ended[#ended + 1] = lease.owner
    end
  end
  lock.leases = leases
  for _, owner in ipairs(ended) do redis.call('HDEL', lock.name, owner) end  -- not before all could be read
  return lock
end

-- The live leases of owners that begin with *start*.
local function leases_of(lock, start)
  local found = {}
  for owner, lease in pairs(count_leases(lock).leases) do
    if string.sub(owner, 1, #start) == start then found[#found + 1] = lease end
  end
  return found
end

-- Whether a limit may be on the other node, because the slot of the lock moves.  Asks for two keys, as line_exists().
local function is_hidden(lock)
  if lock.hidden == nil then lock.hidden = not pcall(redis.call, 'EXISTS', lock.name .. LIMIT, lock.name .. NEVER) end
  return lock.hidden
end

-- Whether the lock admits one more lease with these terms.  While a limit may be hidden it admits none, as it may be
-- paused.  If the lock has room and it is only too early for its rate, lock.early is the microseconds until the next
-- start, and lock.asked the terms.
local function admits(lock, terms)
  lock.early = nil
  if not has_room(count_leases(lock), terms, limit_set(lock)) or is_hidden(lock) then return false end
  local early = starts_in(lock, terms, lock.gates)
  if early > 0 then lock.early, lock.asked = early, terms end
  return early == 0
end

-- Raise an error if one of the lock's keys cannot be read.  Called before anything is changed, as what a script has
-- done before an error stays.  *hashes*: endings of the keys that are hashes.
local function check_keys(lock, hashes)
  count_leases(lock)
  for _, key in ipairs({lock.line, lock.handed}) do fail_unless_moving(pcall(redis.call, 'ZCARD', key)) end
  for _, ending in ipairs(hashes) do fail_unless_moving(pcall(redis.call, 'HLEN', lock.name .. ending)) end
  fail_unless_moving(pcall(redis.call, 'LINDEX', lock.name .. STARTS, 0))
  overrides(lock)
end

-- Returns a token higher than all that this script has seen of the lock, as text.
local function new_token(lock)
  local newest = count_leases(lock).newest
  return newest < now_us and now_as_token or string.format('%.0f', newest + 1)
end

-- Returns the token of the new lease.
local function grant(lock, owner, ttl_ms, terms, holder, version)
  local token = new_token(lock)
  local alone = lock.x + lock.s == 0
  put(lock, {
    owner = owner, expires = now + ttl_ms, token = token, acquired = now, mode = mode_of(terms), holder = holder,
    version = version,
  })
  if alone then redis.call('PEXPIRE', lock.name, ttl_ms) else live_at_least(lock.name, ttl_ms) end
  return token
end

local NOT_KNOWN = -1  -- as held_ms

-- The lease of another delivery of the same task, beside which this owner would run twice at a time.
local function copy_of(lock, owner)
  local task = string.match(owner, '^[^@]*@')
  return task and leases_of(lock, task)[1]
end

-- The five values of a lease in a refusal of this owner: remaining_ms, owner, holder, held_ms, and 1 if the lease is that
-- of another delivery, the body or the ticket of the owner's own task, which must not be skipped; else 0.
local function about(lease, owner)
  local function task_of(one)
    if is_parked(one) then return id_of(ticket_of(one)) end
    return string.match(one, '^~?([^@~]*):~') or string.match(one, '^~?([^@~]*)@')
  end
  local is_copy = task_of(owner) and task_of(owner) == task_of(lease.owner)
  return lease.expires - now, lease.owner, lease.holder, now - lease.acquired, is_copy and 1 or 0
end

-- The lease in the way that ends first, as about() returns it.  Of two that end at once, the older one.
-- If it is only too early, the time until the lock may be taken.  If nobody holds the lock, it is paused, or waits
-- for a parked task whose turn comes again soon.
local function in_the_way(lock, owner)
  if lock.early then
    return math.ceil(lock.early / 1000), '', cjson.encode(as_early(lock, lock.asked)), NOT_KNOWN, 0
  end
  local first
  for _, lease in pairs(count_leases(lock).leases) do
    local sooner = first and lease.expires - first.expires
    if not first or sooner < 0 or sooner == 0 and lease.token - first.token < 0 then first = lease end
  end
  if first then return about(first, owner) end
  local limit, note = limit_set(lock)
  local holder = limit == 0 and cjson.encode({paused = true, note = note}) or '{"parked":true}'
  return TAKE_UP_MS, '', holder, NOT_KNOWN, 0
end
