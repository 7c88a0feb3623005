-- _free.lua: the usual case of an acquisition: nobody holds the lock, and nobody waits for it.  Scripts that grant
-- leases answer this case before they define the rest, which takes longer than these commands.

-- include: _starts

-- Returns the token, as text.  Nothing if the lock has a lease or one of the other keys that are given, if an operator
-- has set a limit or a rate, if it is too early, if the clock was set back, or if the slot moves: a key may be on the
-- other node then.
local function grant_free(lock, owner, ttl_ms, terms, holder, ...)
  local keys = {lock, lock .. LIMIT, lock .. RATE}
  for _, ending in ipairs({...}) do keys[#keys + 1] = lock .. ending end
  local seen, there = pcall(redis.call, 'EXISTS', unpack(keys))
  if not seen or there > 0 then return nil end
  terms = parse_terms(terms)
  if terms.most then
    if newest(lock) > now_us or due_in(lock, terms.most, terms.window, 0) > 0 then return nil end
    add_start(lock, terms.most, terms.window)
  end
  write(lock, owner, now + ttl_ms, now_as_token, now, terms.mode, holder)
  redis.call('PEXPIRE', lock, ttl_ms)
  return now_as_token
end
