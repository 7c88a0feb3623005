-- holders.lua: tell who holds a lock.
--
-- KEYS[1]   lock
--
-- Returns   {owner, remaining_ms, token, mode, holder, ...}   five for each live lease
--
-- Changes nothing.

-- include: _lease

use(KEYS[1])
local found = {}
local leases = redis.call('HGETALL', lock)
for i = 1, #leases, 2 do
  local expires, token, _, rest = parse(leases[i + 1])
  if expires > now then
    found[#found + 1] = leases[i]
    found[#found + 1] = expires - now
    found[#found + 1] = string.format('%.0f', token)
    found[#found + 1] = string.sub(rest, 1, 1)
    found[#found + 1] = string.sub(rest, 3)
  end
end
return found
