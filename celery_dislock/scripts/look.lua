-- look.lua: tell all that is known of a lock, for people and tools.
--
-- KEYS[1]   lock
-- ARGV[1]   first   rank in line of the first place to tell, from 0
-- ARGV[2]   most    places to tell; also of those that have their turn
--                   -1: the leases alone, which are there while a cluster moves the slot
--
-- Touches   the lock, its line and what belongs to it; changes nothing
--
-- Returns   {now_ms, leases, waiting, line, turns, aside, reservation, limit, limit_ms}
--
--   now_ms         Redis TIME
--   leases         {owner, expires_ms, token, mode, holder, acquired_ms, ...}   six for each live lease
--   waiting        how many stand in line
--   line           {member, joined_us, record, ...}   of an owner what it waits for, see _record.lua; of a
--                  ticket what is parked, see _parked.lua, without the body of its message
--   turns          {ticket, ends_ms, record, ...}     of those whose message is on its way
--   aside          how many tickets were set aside
--   reservation    see _unique.lua; empty: there is none
--   limit          see limit.lua; empty: there is none
--   limit_ms       until that ends; negative: it does not, or is not there

-- include: _lease

local HEADER_MOST = 16384  -- bytes of a record; what is cut off cannot be read, and is shown as such

local name, first, most = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2])

local function leases()
  local told = {}
  local found = redis.call('HGETALL', name)
  for i = 1, #found, 2 do
    local lease = read(found[i], found[i + 1])
    if lease.expires > now then
      for _, part in ipairs({
        lease.owner, lease.expires, string.format('%.0f', lease.token), lease.mode, lease.holder,
        lease.acquired,
      }) do told[#told + 1] = part end
    end
  end
  return told
end

local function parked(ticket)
  local record = redis.call('HGET', name .. TICKETS, ticket) or ''
  return string.sub(string.match(record, '^[^\n]*'), 1, HEADER_MOST)
end

local function line()
  if most == 0 then return {} end
  local told = redis.call('ZRANGE', name .. LINE, first, first + most - 1, 'WITHSCORES')
  local with_records = {}
  for i = 1, #told, 2 do
    local member = told[i]
    local is_ticket = string.sub(member, -1) == '#'
    with_records[#with_records + 1] = member
    with_records[#with_records + 1] = told[i + 1]
    with_records[#with_records + 1] = is_ticket and parked(string.sub(member, 1, -2))
      or redis.call('HGET', name .. PLACES, member) or ''
  end
  return with_records
end

local function turns()
  if most == 0 then return {} end
  local told = {}
  local found = redis.call('ZRANGE', name .. HANDED, 0, most - 1, 'WITHSCORES')
  for i = 1, #found, 2 do
    told[#told + 1] = found[i]
    told[#told + 1] = found[i + 1]
    told[#told + 1] = parked(found[i])
  end
  return told
end

if most < 0 then return {now, leases(), 0, {}, {}, 0, '', '', -2} end

-- The usual case, of which a list has thousands.
local seen, there = pcall(redis.call, 'EXISTS',
  name .. LINE, name .. HANDED, name .. ASIDE, name .. UNIQUE, name .. LIMIT)
if seen and there == 0 then return {now, leases(), 0, {}, {}, 0, '', '', -2} end

return {
  now, leases(), redis.call('ZCARD', name .. LINE), line(), turns(),
  redis.call('HLEN', name .. ASIDE),
  redis.call('GET', name .. UNIQUE) or '',
  redis.call('GET', name .. LIMIT) or '', redis.call('PTTL', name .. LIMIT),
}
