-- _free.lua: the usual case of an acquisition.  Nobody has the lock, and nobody waits for it: the scripts
-- that grant leases say so before they include the rest.

-- Whether none of these keys of a lock is there.  False also where its slot moves, and a key may be on the
-- other node.
local function is_free(...)
  local seen, there = pcall(redis.call, 'EXISTS', ...)
  return seen and there == 0
end

-- Returns the token.  Writes what record_of() writes, for a third of its time: numbers of 16 digits are
-- slow to format.
local function grant_free(lock, owner, ttl_ms, mode, holder)
  local us = string.sub('00000' .. time[2], -6)
  local token = time[1] .. us
  redis.call('HSET', lock, owner, table.concat({
    '1', now + ttl_ms, token, time[1] .. string.sub(us, 1, 3), mode, holder,
  }, ' '))
  redis.call('PEXPIRE', lock, ttl_ms)
  return token
end
