-- free.lua: end one lease at a person's command, and hand the lock on.
--
-- KEYS[1]   lock
-- ARGV      owner      of the lease
--           token      of the lease
--           broker     the caller's broker; empty: it cannot publish
--           or_older   1: also end a lease with an older token: of several servers each has a token of its own, and
--                      the newest one is given
--
-- Returns   1 or {1, turns} ended   0 it had ended before, or the owner has another lease by now
-- Touches all keys of the lock but those of its marks.  Also ends a lease that is left to expire.  A parked task whose
-- turn or unit is ended goes to the end of its first line.  Sent twice, the second answers 0.

-- include: _parked

local owner, token, or_older
owner, token, broker, or_older = unpack(ARGV)
token = tonumber(token)
local lock = open_whole(KEYS[1])

local function shown()
  for _, name in ipairs({owner, '~' .. owner}) do
    local lease = lease_of(lock, name)
    local its = lease and tonumber(lease.token)
    if its and (its == token or or_older == '1' and its < token) then return lease end
  end
end

local lease = shown()
if not lease then return 0 end
end_lease(lock, lease)
redis.call('DEL', lock.name .. WAKE .. owner)  -- the owner's news, if it was handed the lease
if is_parked(owner) then
  local ticket, beside = ticket_of(owner)
  local seen, its = pcall(open_whole, beside or lock.name)
  -- A ticket whose own lock cannot be read finds later that its unit is gone.
  local parked = seen and read_ticket(its, ticket)
  -- If nobody else waits, its message is published again now.
  if parked then arrive_anew(its, ticket, parked) end
  if parked and beside then recall_and_hand_off(its) end
end
recall_and_hand_off(lock)
return turns[1] and {1, turns} or 1
