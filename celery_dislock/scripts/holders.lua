-- holders.lua: tell who holds a lock.
--
-- KEYS[1]   lock
--
-- Returns   {owner, remaining_ms, token, mode, holder, ...}   five for each live lease
--
-- Touches the lock alone, and changes nothing.

-- include: _record
-- include: _lease

local told = {}
local found = redis.call('HGETALL', KEYS[1])
for i = 1, #found, 2 do
  local lease = read(found[i], found[i + 1])
  if lease.expires > now then
    told[#told + 1] = lease.owner
    told[#told + 1] = lease.expires - now
    told[#told + 1] = string.format('%.0f', lease.token)
    told[#told + 1] = lease.mode
    told[#told + 1] = lease.holder
  end
end
return told
