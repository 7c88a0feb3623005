-- _lease.lua: how a lease is written.  Put in front of every other script when it is loaded.
--
-- A lock is one hash, KEYS[1] = <prefix>{<key>}: a field per lease.
--
--   owner -> "1 expires_ms token acquired_ms mode holder"
--
--     1            version of this format
--     expires_ms   Redis TIME at which the lease ends
--     token        fencing token, grows with each new lease of the lock
--     acquired_ms  Redis TIME of the acquisition
--     mode         x exclusive
--     holder       JSON object for messages and tools: task, id, worker, pid
--
-- A field whose name begins with "~" is a lease whose owner is done and which only runs out
-- (lock_at_least_for): it still holds the lock, and nobody can renew or release it.
--
-- The hash lives as long as its longest lease.  An ended lease that shares its hash with a live
-- one is swept out by the next acquire that is granted.

local lock = KEYS[1]

local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
local now = math.floor(now_us / 1000)

local function parse(lease)
  local expires, token, acquired, rest = string.match(lease, '^1 (%d+) (%d+) (%d+) (.*)$')
  return tonumber(expires), tonumber(token), tonumber(acquired), rest
end

local function write(owner, expires, token, acquired, rest)
  redis.call('HSET', lock, owner,
    string.format('1 %.0f %.0f %.0f %s', expires, token, acquired, rest))
end

local function live_at_least(ttl_ms)
  if redis.call('PTTL', lock) < ttl_ms then redis.call('PEXPIRE', lock, ttl_ms) end
end

-- The owner is done with its lease: end it now, or at acquired + at_least_ms.
local function finish(owner, lease, at_least_ms)
  redis.call('HDEL', lock, owner)
  if at_least_ms == 0 then return end
  local _, token, acquired, rest = parse(lease)
  if acquired + at_least_ms > now then
    write('~' .. owner, acquired + at_least_ms, token, acquired, rest)
    if redis.call('HLEN', lock) == 1 then
      redis.call('PEXPIRE', lock, acquired + at_least_ms - now)
    else
      live_at_least(acquired + at_least_ms - now)
    end
  end
end
