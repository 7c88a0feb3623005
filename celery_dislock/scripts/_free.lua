-- _free.lua: the usual case of an acquisition: nobody holds the lock, and nobody waits for it.  Scripts that grant
-- leases answer this case before they define the rest, which takes longer than these commands.

-- include: _record

local PLAIN_TERMS = '^[xs]:%d+$'  -- terms without a rate or a cost; see _terms.lua

-- Whether a lock has no lease, none of the other keys that are given, and nothing that an operator has set.  If the
-- slot moves, the answer is no: a key may be on the other node.
local function is_free(lock, ...)
  local seen, there = pcall(redis.call, 'EXISTS', lock, lock .. LIMIT, ...)
  return seen and there == 0
end

-- Returns the token of the new lease, as text.
local function grant_free(lock, owner, ttl_ms, mode, holder)
  write(lock, owner, now + ttl_ms, now_as_token, now, mode, holder)
  redis.call('PEXPIRE', lock, ttl_ms)
  return now_as_token
end
