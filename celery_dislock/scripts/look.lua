-- look.lua: tell all that is known of a lock, for people and tools.
--
-- KEYS[1]   lock
-- ARGV[1]   first   rank in line of the first place to tell, from 0
-- ARGV[2]   most    places to tell; also of those that have their turn
--                   -1: the leases alone, which are there while a cluster moves the slot
--
-- Returns   {now_ms, leases, waiting, line, turns, aside, reservation, ticked_ms, rate, overrides}
--   now_ms         Redis TIME
--   leases         {owner, expires_ms, token, mode, holder, acquired_ms, ...}   six for each live lease
--   waiting        how many stand in line
--   line           {member, joined_us, record, ...}   record: of an owner its place, see _record.lua; of a ticket its
--                  record, see _parked.lua, in two lines: the second has the head of its message; empty if the
--                  member cannot be read, or the lock that has the record
--   turns          {ticket, ends_ms, record, ...}     of parked tasks that have their turn
--   aside          how many tickets were set aside
--   ticked_ms      since a beat that leads has claimed or noted a tick; -1: no beat has, for thirty days
--   rate           {in_effect, early_ms, held_back}
--                  in_effect     "most/window_ms" of the first in line, or else of the last starts; or empty
--                  early_ms      until the next start may be; 0: now
--                  held_back     name of what is set that holds it back; empty: nothing
--   reservation    the record of _unique.lua; empty: there is none
--   overrides      what people have set, as show_overrides() returns it
-- Touches the lock, its line and what belongs to it, and the tickets beside other locks that stand in this line;
-- changes nothing.

-- include: _rate
-- include: _shown

local lock, first, most = open(KEYS[1]), tonumber(ARGV[1]), tonumber(ARGV[2])
local name = lock.name

local function add(list, ...)
  for _, part in ipairs({...}) do list[#list + 1] = part end
end

local function leases()
  local live, found = {}, redis.call('HGETALL', name)
  for i = 1, #found, 2 do
    local lease = read(found[i], found[i + 1])
    if lease.expires > now then
      take_room(lock, lease, 1)
      add(live, lease.owner, lease.expires, lease.token, lease.mode, lease.holder, tonumber(lease.acquired))
    end
  end
  return live
end

-- The members of a sorted set from a rank on, each with its score and its record; *ends*: what its member ends with.
local function listed(key, from, ends)
  if most == 0 then return {} end
  local list, found = {}, redis.call('ZRANGE', key, from, from + most - 1, 'WITHSCORES')
  for i = 1, #found, 2 do add(list, found[i], found[i + 1], show_waiter(lock, found[i] .. ends)) end
  return list
end

-- In the usual case, of which a list has thousands, there are leases alone.
local seen, there = true, 0
if most >= 0 then
  seen, there = pcall(redis.call, 'EXISTS',
    lock.line, lock.handed, name .. ASIDE, name .. UNIQUE, name .. BEAT, name .. LIMIT, name .. STARTS)
end
if seen and there == 0 then return {now, leases(), 0, {}, {}, 0, '', -1, {'', 0, ''}, {}} end

-- The terms of a parked task at this lock, given its record; nothing if they cannot be read.
local function terms_here(record)
  local stations = string.match(record, '^%d+ %d+ %d+ %d+ %S+ %d+ ([^\n]*)') or ''
  local seen, found = pcall(cjson.decode, stations)
  for _, one in ipairs(seen and type(found) == 'table' and found or {}) do
    if type(one) == 'table' and one[1] == name then return type(one[2]) == 'string' and parse_terms(one[2]) end
  end
  return parse_terms(string.match(stations, '^%S*'))
end

-- The terms of the first in line; else a rate that its starts are kept for.
local function next_terms()
  local member = redis.call('ZRANGE', lock.line, 0, 0)[1]
  local record, terms = member and show_waiter(lock, member) or ''
  if member and is_parked(member) then terms = terms_here(record)
  else terms = parse_terms(string.match(record, '^%d+ %d+ %d+ (%S+)') or '') end
  if terms then return terms end
  return lock.log.most > 0 and {most = lock.log.most, window = lock.log.window, cost = 1} or {cost = 1}
end

lock.log = log_of(name)  -- the starts as they are: this script changes nothing
local terms, live = next_terms(), leases()
local most, window = rate_of(lock, terms)
local ends_ms = redis.call('PTTL', name .. BEAT)
return {
  now, live, redis.call('ZCARD', lock.line), listed(lock.line, first, ''),
  listed(lock.handed, 0, '#'), redis.call('HLEN', name .. ASIDE),
  redis.call('GET', name .. UNIQUE) or '',
  ends_ms < 0 and -1 or KEPT_MS - ends_ms,
  {
    most and string.format('%.0f/%.0f', most, window) or '',
    math.ceil(starts_in(lock, terms, lock.gates) / 1000), (held_back(lock) or {name = ''}).name,
  },
  show_overrides(lock),
}
