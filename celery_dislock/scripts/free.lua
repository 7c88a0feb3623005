-- free.lua: end one lease because a person wants it, and hand the lock on.
--
-- KEYS[1]   lock
-- ARGV      owner      of the lease
--           token      of the lease
--           home       the caller's broker; empty: it cannot publish
--           or_older   1: each of several servers has a token of its own, and the newest of them is given
--
-- Returns   1 or {1, turns} ended   0 it had ended before, or the owner has another lease by now
-- Touches all keys of the lock but those of its marks.  Also ends a lease that is left to expire, and the
-- turn of a parked task, which goes to the end of the line.  Sent twice, the second answers 0.

-- include: _parked

local owner, token, or_older
owner, token, home, or_older = unpack(ARGV)
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
drop(lock, lease)
redis.call('DEL', lock.name .. WAKE .. owner)  -- its news, if it was handed the lease
local ticket = is_parked(owner) and ticket_of(owner)
if ticket and redis.call('ZREM', lock.handed, ticket) == 1 then  -- if nobody else waits, it is sent again now
  local joined, parked = joins_at(lock), read_ticket(lock, ticket)
  if parked then
    parked.joined = joined
    write_ticket(lock, ticket, parked)
  end
  join(lock, ticket, joined)
end
recall_and_hand_off(lock)
return turns[1] and {1, turns} or 1
