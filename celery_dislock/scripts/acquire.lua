-- acquire.lua: take a lock if it admits one more lease, or wait in line for it.
--
-- KEYS[1]   lock
-- ARGV[1]   owner
-- ARGV[2]   ttl_ms     integer > 0
-- ARGV[3]   holder     JSON, for messages and tools
-- ARGV[4]   mode       x exclusive: admitted beside no shared lease, and fewer than limit of its own
--                      s shared: admitted beside no exclusive lease
-- ARGV[5]   limit      integer > 0
-- ARGV[6]   place_ms   > 0: wait in line, where the place is kept so long unless asked again
--                      0: do not wait
-- ARGV[7]   fair       1: come after those who wait   0: pass them where the lock admits one more
--
-- Returns   {1, token}                         granted: the lease ends in ttl_ms unless renewed
--           {0, remaining_ms, owner, holder}   refused: of the leases in the way, the one that ends
--                                              first; the asker is in line, if it is to wait
--
-- Safe to send twice: an owner that has the lock already gets the same token again, and its
-- expiry is reset; one that waits already keeps its place.

local owner, ttl, holder = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local mode, limit, place_ms = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])

local mine = count_leases(owner)
if mine then
  local _, token, acquired, rest = parse(mine)
  write(owner, now + ttl, token, acquired, rest)
  live_at_least(lock, ttl)
  redis.call('DEL', lock .. ':wake:' .. owner)
  return {1, string.format('%.0f', token)}
end

local waiting = redis.call('EXISTS', line) == 1
if admits(mode, limit) and (not waiting or ARGV[7] == '0') then
  if waiting then leave_line(owner) end
  return {1, string.format('%.0f', grant(owner, ttl, mode, holder))}
end

if place_ms > 0 then
  join_line(owner, place_ms, ttl, mode, limit, holder)
  waiting = true
end
if waiting then
  local token = hand_on(owner)
  if token then return {1, string.format('%.0f', token)} end
  count_leases()
  if place_ms == 0 and admits(mode, limit) and redis.call('EXISTS', line) == 0 then
    return {1, string.format('%.0f', grant(owner, ttl, mode, holder))}
  end
end
return {0, first_expires - now, first, string.sub(first_rest, 3)}
