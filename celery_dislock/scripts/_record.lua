-- _record.lua: how a lease is written.  Included first, also by scripts that do nothing else with it.
--
-- A lock is a hash with a field per lease:
--
--   owner -> "1 expires_ms token acquired_ms mode holder"
--
--     1            version of this format
--     expires_ms   Redis TIME at which the lease ends
--     token        fencing token, grows with each new lease of the lock
--     acquired_ms  Redis TIME of the acquisition
--     mode         x exclusive, s shared
--     holder       JSON object for messages and tools: task, id, worker, pid, host
--
-- A script costs the server what it defines before it begins: twenty functions take longer than the
-- five commands of an acquisition.  So a script that can answer in the usual case does so before it
-- includes the rest.

-- include: _names

local RESERVED_MS = 5000  -- for a waiter to take up a lease that it was handed
-- Two hours in which a copy of a message may come: twice the time after which Redis brokers deliver again.
local COPY_MS = 7200000

-- Digits of the numbers in a record: times in ms, and tokens, which are microseconds or a little more.
-- A longer one was written by hand, and could not be written again.
local TIME_DIGITS, TOKEN_DIGITS = 15, 16

local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
local now = math.floor(now_us / 1000)

-- As string.format('%.0f', now_us), for a third of its time: numbers of 16 digits are slow to format.
local function time_as_token()
  return time[1] .. string.sub('00000' .. time[2], -6)
end

local function live_at_least(key, ttl_ms)
  if redis.call('PTTL', key) < ttl_ms then redis.call('PEXPIRE', key, ttl_ms) end
end
