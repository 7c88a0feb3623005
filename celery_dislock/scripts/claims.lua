-- claims.lua: tell which parked tasks of a lock were claimed, or note that these were.
--
-- KEYS[1]   lock
-- ARGV      tickets   to be noted, unless something is known of one; none: only tell
--
-- Returns   {ticket, ...}   that were claimed, and whose work is not done
-- Touches the lock's tickets, claims and marks.  Safe to send twice.  For tasks that were claimed on another
-- lock server, and whose process may have died: a copy that comes runs.

-- include: _parked

local lock = open_whole(KEYS[1])
for _, ticket in ipairs(ARGV) do
  if redis.call('HEXISTS', lock.tickets, ticket) == 0 and redis.call('HEXISTS', lock.running, ticket) == 0
    and not is_done(lock, ticket) then
    write_claim(lock, ticket, now_us, now, IN_BODY)
  end
end
return redis.call('HKEYS', lock.running)
