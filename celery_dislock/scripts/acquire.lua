-- acquire.lua: take a lock if it admits one more lease, or wait in line for it; or several locks.
--
-- KEYS      the locks, in the order in which everybody takes them
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
-- Returns   {1, token, ...}                         granted, with the token of each lock: the leases
--                                                   end in ttl_ms unless renewed
--           {0, remaining_ms, owner, holder, nth}   refused by the nth lock, counted from 0: of the
--                                                   leases in the way, the one that ends first
--
-- An asker that is not to wait gets all of the locks or none.  One that waits stands in line at the
-- lock that refused it, and keeps those before it meanwhile: all take them in the same order, so
-- that no two can wait for each other.
--
-- Safe to send twice: an owner that has a lock already gets the same token again, and its
-- expiry is reset; one that waits already keeps its place.
--
-- While a slot moves, who is not to wait is answered by the lock alone, and passes a line that
-- cannot be seen; who is to wait gets an error.

-- include: _lease

local owner, ttl, holder = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local mode, limit, place_ms = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])

-- Returns the token, and whether its lease is a new one; nothing where the lock refuses.
local function take()
  local mine = count_leases(owner)
  if mine then
    local _, token, acquired, rest = parse(mine)
    write(owner, now + ttl, token, acquired, rest)
    live_at_least(lock, ttl)
    pcall(redis.call, 'DEL', lock .. ':wake:' .. owner)  -- it ends by itself where the slot moves
    return token, false
  end

  local seen, waiting = pcall(line_exists)
  if not seen then waiting = place_ms > 0 and line_exists() end
  if admits(mode, limit) and (not waiting or ARGV[7] == '0') then
    if waiting then leave_line(owner) end
    return grant(owner, ttl, mode, holder), true
  end

  if place_ms > 0 then
    join_line(owner, place_ms, ttl, mode, limit, holder)
    waiting = true
  end
  if waiting then
    local token = hand_on(owner)
    if token then return token, true end
    count_leases()
    if place_ms == 0 and admits(mode, limit) and redis.call('EXISTS', line) == 0 then
      return grant(owner, ttl, mode, holder), true
    end
  end
end

local granted, new = {1}, {}
for nth, key in ipairs(KEYS) do
  use(key)
  local token, is_new = take()
  if not token then
    local remaining, who, its_holder = in_the_way()
    local refusal = {0, remaining, who, its_holder, nth - 1}
    if place_ms == 0 then
      for _, taken in ipairs(new) do redis.call('HDEL', taken, owner) end
    end
    return refusal
  end
  granted[nth + 1] = string.format('%.0f', token)
  if is_new then new[#new + 1] = key end
end
return granted
