-- where.lua: tell where a waiter or a parked task stands, and when it starts.
--
-- KEYS[1]   lock      that has its record
-- ARGV      members   owner of a waiter, or "<ticket>#" of a parked task; of several the first that waits
--
-- Returns   {now_ms, lock, rank, member, joined_us, record, ends_ms, of, starts_ms, is_estimate}
--             lock         in whose line it stands, which may be another; KEYS[1] if it has its turn
--             rank         in that line, from 0; -1: it has its turn, or its place is lost
--             member       of that line; joined_us: its score
--             record       what it waits for, as look.lua tells it
--             ends_ms      Redis TIME at which its turn ends; 0: it has none
--             of           how many stand in that line
--             starts_ms    until it may start; -1: not known
--             is_estimate  0: that is a time at which a rate, or a hold-back, lets it start   1: it depends on bodies or
--                          on workers
--           nothing        none of them waits
-- Touches all keys of the lock, and the lines of the others that the parked task passes; changes nothing.

-- include: _parked
-- include: _shown
-- include: _lasted

local lock = open_whole(KEYS[1])

-- Milliseconds until a lock with others in line, *rank* of them before it, admits somebody with these terms, and whether
-- that is an estimate; nothing if it is not known.  Bodies are taken to last as they did lately.
local function opens_in(at, terms, rank)
  local limit = limit_set(at) or terms.limit
  local by_rate = math.ceil(starts_in(at, terms, at.gates + rank * terms.cost) / 1000)
  if (terms.mode == 's' and at.x or at.s) > 0 then return nil end
  local nth = (rank + 1) * terms.cost + at.x - limit  -- which of the ends to come it waits for
  if terms.mode == 's' or nth <= 0 then return by_rate, terms.has_cost and rank > 0 end
  if terms.has_cost then return nil end  -- what those before it cost, and those that run, is not told here
  local mean = lasted(at)
  if not mean then return nil end
  local back = held_back(at)
  local begins = back and back.until_ms - now or 0
  local ends = {}  -- milliseconds until each lease ends
  for owner, lease in pairs(at.leases) do
    local left = math.max(0, mean - (now - lease.acquired))
    if is_parked(owner) then left = begins + mean  -- a turn: the body has not begun
    elseif string.byte(owner) == string.byte('~') then left = lease.expires - now end
    ends[#ends + 1] = left
  end
  table.sort(ends)
  local rounds = math.max(0, math.ceil((nth - at.x) / limit))  -- of those that start before it, and end
  return math.max(by_rate, math.max(begins, ends[nth - rounds * limit] or 0) + rounds * mean), true
end

-- Milliseconds until a parked task may start that waits at its nth station, or has passed all, and whether that is an
-- estimate; nothing if it is not known, as others wait at a later station.
local function starts_in_all(ticket, parked, here, rank)
  if not parked or parked.is_later then return nil end
  local longest, is_estimate = 0, false
  for nth, station in ipairs(parked.stations) do
    local at = station_of(lock, ticket, parked.stations, nth)
    local wait, estimated
    if not at or limit_set(count_leases(at)) == 0 then return nil end
    at.log = log_of(at.name)  -- the starts as they are: this script changes nothing
    if not here or nth < here then wait = math.ceil(starts_in(at, station.terms, 0) / 1000)
    elseif nth == here then wait, estimated = opens_in(at, station.terms, rank)
    elseif redis.call('EXISTS', at.line) == 0 and admits(at, station.terms) then wait, estimated = 0, true end
    if not wait then return nil end
    longest, is_estimate = math.max(longest, wait), is_estimate or estimated
  end
  return longest, is_estimate or longest == 0
end

local function told(at, rank, member, joined, ends_ms, starts_ms, is_estimate)
  local of = redis.call('ZCARD', at.line)
  return {now, at.name, rank, member, joined, show_waiter(at, member), ends_ms, of, starts_ms or -1, is_estimate and 1 or 0}
end

local function in_line(at, member)
  local rank = at and redis.call('ZRANK', at.line, member)
  return rank, rank and redis.call('ZSCORE', at.line, member)
end

local function find(member)
  local ticket = is_parked(member) and ticket_of(member)
  local parked = ticket and read_ticket(lock, ticket)
  for nth = 1, parked and #parked.stations or 1 do
    local at, its = lock, member
    if nth > 1 then at, its = station_of(lock, ticket, parked.stations, nth) end
    local rank, joined = in_line(at, its)
    if rank then return told(at, rank, its, joined, 0, starts_in_all(ticket, parked, nth, rank)) end
  end
  if not parked then return nil end
  local ends_ms = tonumber(redis.call('ZSCORE', lock.handed, ticket) or 0)
  local starts_ms, is_estimate
  if ends_ms > 0 then starts_ms, is_estimate = starts_in_all(ticket, parked) end
  return told(lock, -1, member, string.format('%.0f', parked.joined), ends_ms, starts_ms, is_estimate)
end

for _, member in ipairs(ARGV) do
  local found = find(member)
  if found then return found end
end
