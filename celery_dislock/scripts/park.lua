-- park.lua: take a lock for a task, or park it in line.
--
-- KEYS[1]   lock
-- ARGV[1]   owner
-- ARGV[2]   ttl_ms     integer > 0
-- ARGV[3]   holder     JSON, for messages and tools
-- ARGV[4]   mode       x or s, and
-- ARGV[5]   limit      as for acquire.lua
-- ARGV[6]   home       the caller's broker
-- ARGV[7]   ticket
-- ARGV[8]   owners of the same task begin so
-- ARGV[9]   marked     1: the message says that it was parked   0: it does not; a parked task of which
--                      nothing is known, as after a failover, runs or is parked again, in a full line,
--                      too, and has a mark when it is done
-- ARGV[10]  message    empty: only ask
-- ARGV[11]  most       so many may wait in line; 0: any number
-- ARGV[12]  most_bytes of their records together
-- ARGV[13]  overflow   skip: refuse who comes to a full line   replace: the oldest makes room
--
-- Returns   {state, turns, ...}, where turns are to be published: {lock, ticket, message, ...}
--
--   {1, turns, token, claimed}                   granted; claimed: 1 a parked task's turn   0 no ticket
--   {0, turns, remaining_ms, owner, holder, place}   refused: of the leases in the way, the one that
--                                                ends first; the place that it would have in line
--   {2, turns, place, remaining_ms, owner, holder, replaced}   parked; replaced: {ticket, message, ...}
--   {3, turns}                                   this work is done: a mark says so, and nothing else does
--   {4, turns, waiting, remaining_ms, owner, holder}   the line is full
--
-- Whoever waits already, and whoever runs in a process that died, keeps its place.  Safe to send
-- twice: the owner is given the same token, the ticket has the same place.

-- include: _lease
-- include: _parked

local owner, ttl, holder = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local mode, limit = ARGV[4], tonumber(ARGV[5])
local ticket, same, marked, message = ARGV[7], ARGV[8], ARGV[9] == '1', ARGV[10]
local most, most_bytes = tonumber(ARGV[11]), tonumber(ARGV[12])
home = ARGV[6]
use_parked(KEYS[1])
line_exists()  -- or an error, before anything is done
local member = ticket .. '#'

local function granted(token, claimed)
  return {1, turns, string.format('%.0f', token), claimed}
end

local function waiting()  -- for their turn
  return redis.call('HLEN', tickets) - redis.call('HEXISTS', tickets, 'bytes')
    - redis.call('ZCARD', handed)
end

local function refused()
  count_leases()
  local remaining, who, its_holder = in_the_way()
  return {0, turns, remaining, who, its_holder, waiting() + 1}
end

local function in_line()
  local place = redis.call('ZRANK', line, member)
  count_leases()
  local remaining, who, its_holder = in_the_way()
  local replaced = message ~= '' and redis.call('HGETALL', lock .. ':replaced') or {}
  return {2, turns, place and place + 1 or 0, remaining, who, its_holder, replaced}
end

local function claim(joined)
  local token = grant(owner, ttl, mode, holder)
  write_claim(ticket, joined, now, 0)
  return token
end

local mine = count_leases(owner)
if mine then
  local _, token, acquired, rest = parse(mine)
  write(owner, now + ttl, token, acquired, rest)
  live_at_least(lock, ttl)
  return granted(token, redis.call('HEXISTS', running, ticket))
end

local parked = redis.call('HGET', tickets, ticket)
local ran = redis.call('HGET', running, ticket)
if not (parked or ran)
  and (is_done(ticket) or marked and redis.call('HEXISTS', lock .. ':aside', ticket) == 1) then
  return {3, turns}
end

if counted.x + counted.s > 0 then  -- another delivery of this task?
  local leases = redis.call('HGETALL', lock)
  for i = 1, #leases, 2 do
    if string.sub(leases[i], 1, #same) == same then
      local expires, _, _, rest = parse(leases[i + 1])
      return {0, turns, expires - now, leases[i], string.sub(rest, 3), 0}
    end
  end
end

if parked then
  pass_on(member)
  if redis.call('HEXISTS', lock, member) == 0 then  -- its message comes again with its turn
    return in_line()
  end
  local joined, _, _, _, _, its_home, its_message = parse_ticket(parked)
  forget(ticket)
  count_leases()
  if joined and not admits(mode, limit) then  -- it was parked in another mode
    write_ticket(ticket, joined, 0, ttl, mode, limit, its_home, its_message)
    join(ticket, joined)
    return in_line()
  end
  local token = claim(joined or now_us)
  if anyone_waits() then pass_on() end  -- shared tasks leave the line together
  return granted(token, 1)
end

if ran then
  local joined, _, settles = parse_claim(ran)
  if settles > now then return {0, turns, settles - now, '', as_holder(ticket), 0} end
  -- Its process has died.
  if admits(mode, limit) then return granted(claim(joined), 1) end
  if message == '' then return refused() end
  redis.call('HDEL', running, ticket)
  write_ticket(ticket, joined, 0, ttl, mode, limit, home, message)
  join(ticket, joined)
  return in_line()
end

if anyone_waits() then pass_on() end
if admits(mode, limit) and not line_exists() then
  if marked then return granted(claim(now_us), 1) end
  return granted(grant(owner, ttl, mode, holder), 0)
end
if message == '' then return refused() end

local size = #message + 80  -- with what is written before it

local function too_many_bytes()
  return tonumber(redis.call('HGET', tickets, 'bytes') or 0) + size > most_bytes
end

-- Whether it would be too big even if nobody waited: those that have their turn do not make room.
local function too_big()
  local on_their_way = 0
  for _, other in ipairs(redis.call('ZRANGE', handed, 0, -1)) do
    on_their_way = on_their_way + redis.call('HSTRLEN', tickets, other)
  end
  return on_their_way + size > most_bytes
end

-- Whether another ticket can be had; makes room where it is to.
local function has_room()
  if too_many_bytes() and too_big() then return false end
  local rank = 0
  while most > 0 and waiting() >= most or too_many_bytes() do
    if ARGV[13] ~= 'replace' then return false end
    local oldest = redis.call('ZRANGE', line, rank, rank)[1]
    if not oldest then return false end
    if string.byte(oldest, -1) == PARKED then
      local other = string.sub(oldest, 1, -2)
      local record = redis.call('HGET', tickets, other) or ''
      local its_message = select(7, parse_ticket(record))
      if its_message then
        redis.call('HSET', lock .. ':replaced', other, its_message)
        keep(lock .. ':replaced')
        forget(other)
        mark_done(other)
      else
        set_aside(other, record)
      end
    else
      rank = rank + 1
    end
  end
  return true
end

if not marked and not has_room() then  -- who was told that it is parked is not turned away
  count_leases()
  local remaining, who, its_holder = in_the_way()
  return {4, turns, waiting(), remaining, who, its_holder}
end
local last = redis.call('ZRANGE', line, -1, -1, 'WITHSCORES')[2]
local joined = math.max(now_us, tonumber(last or 0) + 1)
write_ticket(ticket, joined, 0, ttl, mode, limit, home, message)
join(ticket, joined)
return in_line()
