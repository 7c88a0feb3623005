-- acquire.lua: take an exclusive lock if nobody else holds it.
--
-- KEYS[1]   lock
-- ARGV[1]   owner
-- ARGV[2]   ttl_ms    integer > 0
-- ARGV[3]   holder    JSON, for messages and tools
--
-- Returns   {1, token}                         granted: the lease ends in ttl_ms unless renewed
--           {0, remaining_ms, owner, holder}   refused: that owner's lease is the one in the way
--
-- Safe to send twice: an owner that has the lease already gets the same token again, and its
-- expiry is reset.  A refusal changes nothing but sweeping out leases that have ended.

local owner, ttl = ARGV[1], tonumber(ARGV[2])
local leases = redis.call('HGETALL', lock)

if #leases == 0 then
  write(owner, now + ttl, now_us, now, 'x ' .. ARGV[3])
  redis.call('PEXPIRE', lock, ttl)
  return {1, string.format('%.0f', now_us)}
end

local last_token, mine, acquired, rest = 0, nil, nil, nil
for i = 1, #leases, 2 do
  local expires, token, since, holding = parse(leases[i + 1])
  if expires <= now then
    redis.call('HDEL', lock, leases[i])
  elseif leases[i] == owner then
    mine, acquired, rest = token, since, holding
  else
    return {0, expires - now, leases[i], string.sub(holding, 3)}
  end
  last_token = math.max(last_token, token)
end

local token = mine or math.max(now_us, last_token + 1)
write(owner, now + ttl, token, acquired or now, rest or 'x ' .. ARGV[3])
redis.call('PEXPIRE', lock, ttl)
return {1, string.format('%.0f', token)}
