-- _free.lua: the usual case of an acquisition.  Nobody has the lock, and nobody waits for it: the scripts
-- that grant leases answer it before they define the rest, which takes longer than these commands.

-- include: _record

-- Whether a lock has no lease, none of these other keys, and nothing that people have set, and is asked for
-- without a rate.  Not while its slot moves, as a key may be on the other node.
local function is_free(lock, terms, ...)
  local keys = {lock, lock .. LIMIT, lock .. RATE}
  for _, ending in ipairs({...}) do keys[#keys + 1] = lock .. ending end
  local seen, there = pcall(redis.call, 'EXISTS', unpack(keys))
  return seen and there == 0 and not string.find(terms, '/', 1, true)
end

-- Returns the token, as text.
local function grant_free(lock, owner, ttl_ms, terms, holder)
  write(lock, owner, now + ttl_ms, now_as_token, now, parse_terms(terms).mode, holder)
  redis.call('PEXPIRE', lock, ttl_ms)
  return now_as_token
end
