-- _free.lua: the usual case of an acquisition.  Nobody has the lock, and nobody waits for it: the scripts
-- that grant leases answer it before they define the rest, which takes longer than these commands.

-- include: _record

-- How many of these keys of a lock exist; false while its slot moves, as a key may be on the other node.
local function count_keys(...)
  local seen, there = pcall(redis.call, 'EXISTS', ...)
  return seen and there
end

-- Returns the token, as text.
local function grant_free(lock, owner, ttl_ms, terms, holder)
  write(lock, owner, now + ttl_ms, now_as_token, now, parse_terms(terms).mode, holder)
  redis.call('PEXPIRE', lock, ttl_ms)
  return now_as_token
end
