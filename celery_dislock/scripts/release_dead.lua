-- release_dead.lua: end what a process held or waited for that died while executing a task.
--
-- KEYS      the locks
-- ARGV[1]   start of the owner: all of it but the counter of its acquisition
-- ARGV[2]   at_least_ms   integer >= 0: hold on until so long after the acquisition;
--                         -1: leave its leases to expire, and only its places in line
-- ARGV[3]   home          the caller's broker; left out: it cannot publish
--
-- Returns   how many leases were ended
--           {that, turns}   turns: {lock, ticket, message, ...}, to be published
--
-- The caller has seen that process end.  Sent twice, the second answers 0.  While a slot moves, as for
-- release.lua.

-- include: _lease
-- include: _parked

local at_least_ms = tonumber(ARGV[2])
home = ARGV[3] or ''

local function dead(owner)
  return string.sub(owner, 1, #ARGV[1]) == ARGV[1]
end

local ended = 0
for _, key in ipairs(KEYS) do
  use_parked(key)
  count_leases()
  local leases = redis.call('HGETALL', lock)
  for i = 1, #leases, 2 do
    if at_least_ms >= 0 and dead(leases[i]) then
      finish(leases[i], leases[i + 1], at_least_ms)
      ended = ended + 1
    end
  end
  line_exists()  -- or an error
  for _, owner in ipairs(redis.call('HKEYS', places)) do
    if dead(owner) then leave_line(owner) end
  end
  count_leases()
  pass_on()
end
return turns[1] and {ended, turns} or ended
