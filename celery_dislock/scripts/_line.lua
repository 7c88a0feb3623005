-- _line.lua: how waiters stand in line.  Included after _grant.lua by the scripts that hand locks on.
--
-- In <lock>:line stand those who wait; in <lock>:places is what they wait for:
--
--   owner -> "1 deadline_ms ttl_ms mode limit holder"
--
-- Each has a list <lock>:wake:<owner>, on which it waits for news: "token ttl_ms place_left_ms" when it
-- was granted the lock, with the time that was left until its place's deadline; empty when it has
-- become the first: another was handed the lock, and has RESERVED_MS to take it up.
--
-- Parked tasks stand in the same line, as "<ticket>#", which is no owner's name; see _parked.lua.
--
-- A place whose deadline is over belongs to a waiter that died: it is passed over.

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
    token, handed = granted or token, handed or woken or parked and served
    if not served then
      if handed and not parked then wake_up(lock, head, '') end
      return token
    end
  end
end
