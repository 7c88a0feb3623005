-- _free.lua: the usual case of an acquisition.  Nobody has the lock, and nobody waits for it: the scripts
-- that grant leases say so before they include the rest.

-- Whether none of these keys of a lock is there.  False also where its slot moves, and a key may be on the
-- other node.
local function is_free(...)
  local seen, there = pcall(redis.call, 'EXISTS', ...)
  return seen and there == 0
end

-- Returns the token.  Writes what record_of() writes.
local function grant_free(lock, owner, ttl_ms, mode, holder)
  local token = time_as_token()
  redis.call('HSET', lock, owner, table.concat({'1', now + ttl_ms, token, now, mode, holder}, ' '))
  redis.call('PEXPIRE', lock, ttl_ms)
  return token
end
