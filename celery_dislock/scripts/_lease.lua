-- _lease.lua: how a lock and its leases are read and changed.
--
-- A field whose name begins with "~" is a lease whose owner is done with it, and which only runs out
-- (lock_at_least_for): it still holds the lock, and nobody can renew or release it.
--
-- Every key lives as long as the longest-lived thing in it.  An ended lease that shares its hash with a
-- live one is deleted when the leases are counted.
--
-- While a cluster moves a slot, a key that is missing may be on the other node.  A lease is safe: the lock is
-- KEYS[1], and the client is sent to the node that has it.  Nothing else is read or written before
-- line_exists() has seen that all keys are here.

-- include: _place

-- What a script knows of a lock:
--   name, line, places, tickets, handed, running   its keys
--   newest               highest token that this script has seen, also of leases that have ended
--   leases               owner -> live lease; false: not counted yet, see _grant.lua
--   x, s                 how many units the live leases of each mode take
--   gates                how many units those take that keep a gate; see _rate.lua
--   gate_rules           the same by their terms, without the costs
--
-- put() and end_lease() alone change leases, and they keep this true.
local function open(name)
  return {
    name = name, line = name .. LINE, places = name .. PLACES, tickets = name .. TICKETS,
    handed = name .. HANDED, running = name .. RUNNING, newest = 0, leases = false, x = 0, s = 0, gates = 0,
    gate_rules = {},
  }
end

-- Whether anyone stands in line.  Asks for a second key, which never exists: while the slot moves, a
-- server that misses one of two keys answers with an error, and the client asks again.
local function line_exists(lock) return redis.call('EXISTS', lock.line, lock.name .. NEVER) == 1 end

-- A ticket's member of a line is also the owner of the lease that keeps a unit for the ticket.
local function is_parked(member) return string.byte(member, -1) == TICKET_ENDS end
local function id_of(ticket) return string.match(ticket, '^(.*):%d+:%d+$') end  -- of its task, encoded
local function member_of(ticket) return ticket .. '#' end  -- beside its record
local function member_elsewhere(lock, ticket) return string.format('%d/', #lock) .. lock .. ticket .. '##' end
-- The ticket of a member, and the name of the lock that has its record, if that is another lock.
local function ticket_of(member)
  if string.byte(member, -2) ~= TICKET_ENDS then return string.sub(member, 1, -2) end
  local length, rest = string.match(member, '^(%d+)/(.*)##$')
  if not length then return member, '' end  -- written by hand: no lock has such a ticket
  return string.sub(rest, length + 1), string.sub(rest, 1, length)
end

-- The lease of an owner, or nothing.  Unless the leases were counted, it may have ended.
local function lease_of(lock, owner)
  if lock.leases then return lock.leases[owner] end
  local record = redis.call('HGET', lock.name, owner)
  return record and read(owner, record) or nil
end

-- What a command has found; false where a moving slot hides it.  A key of another type is an error.
local function fail_unless_moving(seen, found)
  if not seen and string.find(found.err or found, 'WRONGTYPE') then error(found) end
  return seen and found
end

-- A server without memory refuses a script whose first write may take some, and no write after another.
-- So a script that only renews or ends a lease begins with a write that changes nothing, and takes no memory.
local function write_first(name) redis.call('HDEL', name, NEVER) end

local function live_at_least(key, ttl_ms)
  if redis.call('PTTL', key) < ttl_ms then redis.call('PEXPIRE', key, ttl_ms) end
end

local function take_out(lock, owner)
  local lease = lock.leases and lock.leases[owner]
  if not lease then return end
  lock.leases[owner] = nil
  take_room(lock, lease, -1)
end

-- Write a live lease, with *fields* in place of its own.  The caller sees to the expiry of the hash.
local function put(lock, lease, fields)
  if fields then
    for name, value in pairs(lease) do fields[name] = fields[name] or value end
    lease = fields
  end
  write(lock.name, lease.owner, lease.expires, lease.token, lease.acquired, lease.mode, lease.holder, lease.version)
  lock.newest = math.max(lock.newest, tonumber(lease.token))
  if not lock.leases then return end
  take_out(lock, lease.owner)
  lock.leases[lease.owner] = lease
  take_room(lock, lease, 1)
end

-- Take a lease away.
local function end_lease(lock, lease)
  redis.call('HDEL', lock.name, lease.owner)
  lock.newest = math.max(lock.newest, tonumber(lease.token))
  take_out(lock, lease.owner)
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
    put(lock, lease, {owner = '~' .. lease.owner, expires = ends})
  end
  end_lease(lock, lease)  -- after put(): a hash that becomes empty may move to another node, and loses its expiry
  if not runs_out then return end
  if redis.call('HLEN', lock.name) == 1 then
    redis.call('PEXPIRE', lock.name, ends - now)
  else
    live_at_least(lock.name, ends - now)
  end
end
