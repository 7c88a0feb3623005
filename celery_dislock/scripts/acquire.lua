-- acquire.lua: take a lock if it admits one more lease, or wait in line for it; or several locks.
--
-- KEYS      the locks, in the order in which all owners take them
-- ARGV[1]   owner
-- ARGV[2]   ttl_ms     integer > 0
-- ARGV[3]   holder     JSON, for messages and tools
-- ARGV[4]   terms      see _terms.lua; for several locks the terms of each: "x:3,x:1", or one for all
-- ARGV[5]   place_ms   > 0: wait in line, where the place is kept for this time unless asked again
--                      0: do not wait
-- ARGV[6]   fair       1: come after those who wait   0: pass them if the lock admits one more lease
--
-- Returns   {1, token, ...}     granted, with the token of each lock: the leases end in ttl_ms unless renewed
--           {0, nth, lease...}  refused by the nth lock, counted from 0; lease: the one in the way, five
--                               values as in_the_way() returns them
-- Touches beside each lock its line and places, and the wake lists of those who wait.
-- An asker that does not wait gets all of the locks or none.  An asker that waits stands in line at the lock that
-- refused it, and keeps the locks before that.  As all take the locks in one order, no two askers wait for each other.
-- A start is counted when the asker has all of the locks; until then it keeps a gate, see _rate.lua.
-- Safe to send twice: an owner that has a lock already gets the same token again, and the lease's expiry is reset;
-- an owner that waits already keeps its place.
--
-- While a slot moves, an asker that does not wait is refused as long as the lock is held, and passes a line
-- that cannot be seen; if a limit cannot be seen, it gets an error.  An asker that waits gets an error.

-- include: _states
-- include: _free

local owner, ttl, holder = ARGV[1], tonumber(ARGV[2]), ARGV[3]

local name = KEYS[1]
local free = #KEYS == 1 and is_free(name, name .. LINE, name .. HANDED)
if free and string.match(ARGV[4], PLAIN_TERMS) then
  return {GRANTED, grant_free(name, owner, ttl, string.sub(ARGV[4], 1, 1), holder)}
end

-- include: _starts

local mode = free and start_free(name, ARGV[4])
if mode then return {GRANTED, grant_free(name, owner, ttl, mode, holder)} end

-- include: _line

local place_ms, passes_line = tonumber(ARGV[5]), ARGV[6] == '0'
local waits = place_ms > 0

-- Whether the first in line costs more than 1.  Nobody passes it: those that need less would keep it out for ever.
local function is_large_first(lock)
  local head = redis.call('ZRANGE', lock.line, 0, 0)[1]
  if not head then return false end
  if not is_parked(head) then
    local place = read_place(redis.call('HGET', lock.places, head))
    return place and place.terms and place.terms.cost > 1
  end
  local ticket, beside = ticket_of(head)
  local seen, record = pcall(redis.call, 'HGET', (beside or lock.name) .. TICKETS, ticket)
  local parked = seen and record and parse_ticket(record)
  for _, station in ipairs(parked and parked.stations or {}) do
    if (station.name or lock.name) == lock.name then return station.terms.cost > 1 end
  end
end

-- Returns the asker's token, whether its lease is new, and whether its start is still to be counted; nothing
-- if the lock refuses.
local function take(lock, terms)
  local holder = waits and #KEYS > 1 and rate_of(lock, terms) and with_gate(holder, terms) or holder
  local mine = lease_of(lock, owner)
  if mine then
    renew(lock, mine, ttl)
    pcall(redis.call, 'DEL', lock.name .. WAKE .. owner)  -- if it is hidden while the slot moves, it expires
    return mine.token, false
  end

  local seen, line_is_there = pcall(line_exists, lock)
  if seen and recall(lock) then line_is_there = true end
  if not seen then line_is_there = waits and line_exists(lock) end
  if admits(lock, terms) and (not line_is_there or passes_line and not is_large_first(lock)) then
    if line_is_there then leave_line(lock, owner) end
    return grant(lock, owner, ttl, terms, holder), true, true
  end

  if waits then
    join_line(lock, owner, place_ms, ttl, terms, holder)
    line_is_there = true
  end
  if line_is_there then
    local token = hand_off(lock, owner)
    if token then return token, true end
    if not waits and admits(lock, terms) and redis.call('EXISTS', lock.line) == 0 then
      return grant(lock, owner, ttl, terms, holder), true, true
    end
    -- If it is only too early, no release wakes the asker: it asks again when those before it in line have started,
    -- of whom the first may have a slower rate.
    local rank = lock.early and redis.call('ZRANK', lock.line, owner)
    if rank then lock.early = math.max(lock.early, starts_in(lock, terms, lock.gates + rank)) end
  end
end

-- End the asker's lease on a lock that comes after the one which refused.  The asker had that one, too, but its lease
-- was ended meanwhile.  With a later lock and without an earlier one, it could wait for an owner that waits for it.
local function give_up(lock)
  local mine = lease_of(lock, owner)
  if not mine then return end
  end_lease(lock, mine)
  local seen, line_is_there = pcall(line_exists, lock)
  if seen and (recall(lock) or line_is_there) then hand_off(lock) end
end

local asked = {}
for one in string.gmatch(ARGV[4], '[^,]+') do asked[#asked + 1] = parse_terms(one) end
local function terms_of(nth) return asked[nth] or asked[1] end

local locks = {}  -- all are read before one is changed
for nth, key in ipairs(KEYS) do
  local lock = open(key)
  locks[nth] = lock
  check_keys(lock, {PLACES})
  if not lease_of(lock, owner) then
    admits(lock, terms_of(nth))
    -- A hidden limit keeps the asker out.  This command answers with the error of a slot that moves, and the client
    -- asks again.
    if lock.hidden and not next(lock.set) then redis.call('EXISTS', lock.name .. LIMIT, lock.name .. NEVER) end
  end
end

local granted, new, starting = {GRANTED}, {}, {}

local function refuse(nth, copy)
  for later = nth + 1, #locks do give_up(locks[later]) end
  if copy then return {REFUSED, nth - 1, about(copy, owner)} end
  return {REFUSED, nth - 1, in_the_way(locks[nth], owner)}
end

for nth, lock in ipairs(locks) do
  local admits_several = limit_set(lock) or not are_alone(terms_of(nth))  -- else any lease is in the way
  local copy = admits_several and not lease_of(lock, owner) and copy_of(lock, owner)
  local token, is_new, starts
  if not copy then token, is_new, starts = take(lock, terms_of(nth)) end
  if not token then
    if not waits then
      for _, taken in ipairs(new) do end_lease(taken, lease_of(taken, owner)) end
    end
    return refuse(nth, copy)
  end
  granted[nth + 1] = token
  if is_new then new[#new + 1] = lock end
  starting[nth] = starts
end

-- The asker has all of the locks.  Its body begins if no rate of theirs is in the way.
for nth, lock in ipairs(locks) do
  local early = has_gate(lease_of(lock, owner)) and starts_in(lock, terms_of(nth), 0) or 0
  if early > 0 then
    lock.early, lock.asked = early, terms_of(nth)
    return {REFUSED, nth - 1, in_the_way(lock, owner)}
  end
end
for nth, lock in ipairs(locks) do
  local mine = lease_of(lock, owner)
  if has_gate(mine) then
    put(lock, mine, {holder = holder})
    starting[nth] = true
  end
  if starting[nth] then count_start(lock, terms_of(nth)) end
end
return granted
