-- _line.lua: how waiters stand in line.
--
-- News on a waiter's wake list: "token ttl_ms place_left_ms" if the waiter was granted the lock, with the time
-- that was left until its place's deadline; empty if the waiter has become the first in line: another was handed
-- the lock, and has TAKE_UP_MS to take it up.  A place whose deadline is over belongs to a waiter that died, and is
-- passed over.  Parked tasks stand in the same line, as "<ticket>#", or "<length>/<lock><ticket>##" if their record
-- is beside another lock, whose name has this length.  No owner has a name like these; see _parked.lua.

-- include: _grant

-- The score with which a newcomer joins: higher than those of all in line, also if the clock was set back.
local function joins_at(lock)
  local last = redis.call('ZRANGE', lock.line, -1, -1, 'WITHSCORES')[2]
  return math.max(now_us, tonumber(last or 0) + 1)
end

local function join_line(lock, owner, place_ms, ttl_ms, terms, holder)
  local joined = not redis.call('ZSCORE', lock.line, owner) and joins_at(lock)
  -- Each key is read or written before the next one is changed: one of another type is an error first.
  redis.call('HSET', lock.places, owner,
    string.format('1 %.0f %.0f %s %s', now + place_ms, ttl_ms, write_terms(terms), holder))
  if joined then redis.call('ZADD', lock.line, string.format('%.0f', joined), owner) end
  live_at_least(lock.line, place_ms)
  live_at_least(lock.places, place_ms)
  -- This waiter may have been handed the lock before, and have stood still until that lease ended.  It would take
  -- the news of that lease for new.
  if joined then redis.call('DEL', lock.name .. WAKE .. owner) end
end

local function leave_line(lock, owner)
  redis.call('DEL', lock.name .. WAKE .. owner)
  redis.call('HDEL', lock.places, owner)
  redis.call('ZREM', lock.line, owner)
end

local function wake_up(lock, owner, news)
  local wake = lock.name .. WAKE .. owner
  redis.call('RPUSH', wake, news)
  redis.call('PEXPIRE', wake, TAKE_UP_MS)
end

-- Give the lock to the waiter that is first in line, or pass the waiter over if it is dead.
-- Returns false if the lock does not admit the waiter; else true, whether the waiter was woken, and the asker's token.
local function serve(lock, waiter, asker)
  local place = read_place(redis.call('HGET', lock.places, waiter))
  if place and not (place.terms and admits(lock, place.terms)) then return false end
  leave_line(lock, waiter)
  if not place then return true end
  if not has_gate(place) then count_start(lock, place.terms) end
  if waiter == asker then
    return true, false, grant(lock, waiter, place.ttl, place.terms, place.holder, place.version)
  end
  local take_up = math.min(place.ttl, TAKE_UP_MS)
  local token = grant(lock, waiter, take_up, place.terms, place.holder, place.version)
  wake_up(lock, waiter, string.format('%s %.0f %.0f', token, take_up, place.deadline - now))
  return true, true
end

local function keep_key(key) live_at_least(key, KEPT_MS) end

local function join(lock, member, joined)
  redis.call('ZADD', lock.line, string.format('%.0f', joined), member)
  keep_key(lock.line)
end

local JOINED_DIGITS = 18  -- microseconds, or a little more

-- Parse the locks that a parked task passes, in their order: name, terms, and when its ticket came to that line; 0:
-- not yet.  A lock that is the only one has no name.  Returns nothing if they cannot be read.
local function parse_stations(text, joined)
  local terms = parse_terms(text)
  if terms then return {{terms = terms, arrived = joined}} end
  local seen, found = pcall(cjson.decode, text)
  local stations = {}
  for nth, one in ipairs(seen and type(found) == 'table' and found or {}) do
    if type(one) ~= 'table' then return nil end
    local name, word, arrived = one[1], one[2], one[3]
    terms = type(name) == 'string' and type(word) == 'string' and parse_terms(word)
    if not terms or type(arrived) ~= 'string' or not string.find(arrived, '^%d+$') or #arrived > JOINED_DIGITS then return nil end
    stations[nth] = {name = name, terms = terms, arrived = tonumber(arrived)}
  end
  return stations[1] and stations
end

local function write_stations(stations)
  if #stations == 1 then return write_terms(stations[1].terms) end
  local written = {}
  for nth, one in ipairs(stations) do
    written[nth] = {one.name, write_terms(one.terms), string.format('%.0f', one.arrived)}
  end
  return cjson.encode(written)
end

-- Parse a parked task's record; see _parked.lua.  Returns nothing if it cannot be read, or there is none.
local function parse_ticket(record)
  local version, joined, times, ttl, broker, length, rest =
    string.match(record or '', '^(%d+) (%d+) (%d+) (%d+) (%S+) (%d+) (.*)$')
  if not joined or #joined > JOINED_DIGITS or #times > NUMBER_DIGITS or #ttl > TIME_DIGITS then return nil end
  local starts = #rest - length  -- of the message, after a space
  local between = string.sub(rest, 1, starts - 1)
  local is_later = version ~= '1'
  local stations = is_later and {{terms = ALONE, arrived = tonumber(joined)}} or parse_stations(between, tonumber(joined))
  if not stations or string.sub(rest, starts, starts) ~= ' ' then return nil end
  return {
    version = version, joined = tonumber(joined), times = tonumber(times), ttl = tonumber(ttl), broker = broker,
    between = is_later and between, stations = stations, message = string.sub(rest, starts + 1), is_later = is_later,
  }
end

-- Put parked tasks whose turn has run out back to their places in line.  Returns whether there were any.
local function recall(lock)
  local run_out = redis.call('ZRANGEBYSCORE', lock.handed, '-inf', now)
  for _, ticket in ipairs(run_out) do
    redis.call('ZREM', lock.handed, ticket)
    local parked = parse_ticket(redis.call('HGET', lock.tickets, ticket))
    join(lock, member_of(ticket), parked and parked.joined or 0)
  end
  return #run_out > 0
end

-- Give a parked task its turn.  Returns false if it must wait; then all behind it must, too.  See _parked.lua.
local give_turn

-- Hand the lock to those first in line, as far as it admits them, and wake them.  The asker is awake already.
-- If any was handed the lock, the next waiter in line is woken, too, to ask again after TAKE_UP_MS: the one that was
-- handed the lock may be dead, and its lease ends then.
-- Returns the asker's token if the asker got the lock.
local function hand_off(lock, asker)
  local token, handed = nil, false
  while true do
    local head = redis.call('ZRANGE', lock.line, 0, 0)[1]
    if not head then return token end
    local parked = is_parked(head)
    local served, woken, granted
    if parked then served = give_turn and give_turn(lock, head, asker)
    else served, woken, granted = serve(lock, head, asker) end
    token, handed = granted or token, handed or woken or parked and served
    if not served then
      if handed and not parked then wake_up(lock, head, '') end
      return token
    end
  end
end
