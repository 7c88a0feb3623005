-- renew_stalled.lua: renew the leases of an execution whose process is alive, but does not renew them itself.
--
-- KEYS[1]   lock
-- ARGV[1]   start of the owner: all of it but the counter of its acquisition
-- ARGV[2]   ttl_ms       integer > 0, counted from now, not added
-- ARGV[3]   overdue_ms   renew a lease that was not renewed for this time
-- ARGV[4]   most_ms      > 0: renew for this time after the acquisition   0: without a limit
--
-- Returns   > 0   a lease was renewed: milliseconds since its renewal before that
--           < 0   the lease was not renewed; without its sign, the number is the milliseconds until it is overdue
--           0     there is no lease, or none that may be renewed
--           "capped"   the lease is overdue, and was renewed for the whole time
-- Touches the lock alone, and creates or revives nothing.  A lease that a waiter was handed and has not
-- taken up is left alone: it lasts for TAKE_UP_MS.

-- include: _lease

local start, ttl, overdue, most = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])

local function may_be_renewed(lease)
  if lease.expires <= now then return false end  -- left there: the next token must be higher
  -- After the clock was set back, any other time may be between the two.
  return ttl <= TAKE_UP_MS or lease.expires - lease.acquired ~= TAKE_UP_MS
end

local answer, lock = 0, open(KEYS[1])
local found = redis.call('HGETALL', lock.name)
for i = 1, #found, 2 do
  if string.sub(found[i], 1, #start) == start then
    local lease = read(found[i], found[i + 1])
    if may_be_renewed(lease) then
      local since = now - (lease.expires - ttl)
      local is_capped = most > 0 and now - lease.acquired >= most
      if since < overdue then
        answer = since - overdue
      elseif is_capped then
        answer = 'capped'
      else
        answer = since
        renew(lock, lease, ttl)
      end
    end
  end
end
return answer
