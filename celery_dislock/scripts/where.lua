-- where.lua: tell where a waiter or a parked task stands.
--
-- KEYS[1]   lock     that has its record
-- ARGV[1]   member   owner of a waiter, or "<ticket>#" of a parked task
--
-- Returns   {now_ms, lock, rank, member, joined_us, record, ends_ms}
--             lock      in whose line it stands, which may be another; KEYS[1] if it has its turn
--             rank      in that line, from 0; -1: it has its turn, or its place is lost
--             member    of that line; joined_us: its score
--             record    what it waits for, as look.lua tells it
--             ends_ms   Redis TIME at which its turn ends; 0: it has none
--           nothing     it does not wait
-- Touches all keys of the lock, and the lines of the others that the parked task passes; changes nothing.

-- include: _parked
-- include: _shown

local lock, member = open_whole(KEYS[1]), ARGV[1]

local function standing(at, its)
  local rank = at and redis.call('ZRANK', at.line, its)
  return rank and {now, at.name, rank, its, redis.call('ZSCORE', at.line, its), show_waiter(at, its), 0}
end

if not is_parked(member) then return standing(lock, member) end
local ticket = ticket_of(member)
local parked = read_ticket(lock, ticket)
if not parked then return standing(lock, member) end
for nth = 1, #parked.stations do
  local found = standing(station_of(lock, ticket, parked.stations, nth))
  if found then return found end
end
local ends_ms = tonumber(redis.call('ZSCORE', lock.handed, ticket) or 0)
return {now, lock.name, -1, member, string.format('%.0f', parked.joined), show_ticket(lock.name, ticket), ends_ms}
