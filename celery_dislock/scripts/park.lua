-- park.lua: take a lock for a task, or park it in line.
--
-- KEYS[1]   lock
-- ARGV      owner, ttl_ms, holder, terms   as for acquire.lua
--           home, ticket
--           same_task  owners of the same task begin with this
--           marked     0: the message does not say that it was parked   1: it does; if nothing is known of
--                      the task, as after a failover, it runs or is parked again
--           message    empty: only ask
--           most, most_bytes   tasks that may wait in line, 0: any number; and of their records together
--           overflow   skip: refuse the task that comes to a full line   replace: the oldest makes room;
--                      that is the one that comes, if it was sent before the first in line
--           task       its name: "task":"...", as its message writes it; empty: not known
--           index      of lines, see _index.lua; empty: on another node, and the client lists the line
--           listed     Redis TIME in microseconds of this node before that; 0: it is not listed yet
--
-- Returns   {state, turns, ...}
--   {1, turns, token, claimed}              granted; claimed: 1 a parked task's turn   0 no ticket
--   {0, turns, place, lease...}             refused; place: that it would have in line; lease: the one in the
--                                           way, four values as in_the_way() has them
--   {2, turns, place, replaced, lease...}   parked; replaced: {ticket, message, ...}
--   {3, turns}                              this work is done: a mark says so, and nothing else does
--   {4, turns, waiting, lease...}           the line is full, or was when this owner asked before
--   {7, turns}                              a later version has parked it: only that can claim its turn
--   {6, turns, listed}                      it was not put in line: list the line, and ask again with this time
-- Touches all keys of the lock, and the index.  A task that waits already keeps its place, and so does one that ran in a
-- process that died.  Who was parked is granted the lock on the terms of its ticket, not on those asked for.
-- Safe to send twice: the owner is given the same token, the ticket has the same place.

-- include: _states
-- include: _free

local owner, ttl, holder, terms, its_home, ticket, same_task, marked, message, most, most_bytes,
  overflow, task, index, listed = unpack(ARGV)
ttl = tonumber(ttl)
local name = KEYS[1]
if marked == '0' and message == '' then
  local free = grant_free(name, owner, ttl, terms, holder, LINE, TICKETS, HANDED, RUNNING, DONE .. ticket)
  if free then return {GRANTED, {}, free, 0} end
end

-- include: _parked
-- include: _index

home, terms, most, most_bytes = its_home, parse_terms(terms), tonumber(most), tonumber(most_bytes)

local NO_PLACE = 0  -- that it would have in line: another delivery of its task is in the way
local lock = open_whole(name)

-- How many wait for their turn.
local function waiting() return count_tickets(lock) - redis.call('ZCARD', lock.handed) end

-- This delivery is over.  If it could claim a turn, a late copy of its request must not: for nobody.
local function in_line()
  if marked ~= '0' then mark_done(lock, owner) end
  local rank = redis.call('ZRANK', lock.line, member_of(ticket))
  local replaced = message ~= '' and unreported(lock) or {}
  return {PARKED, turns, rank and rank + 1 or waiting(), replaced, in_the_way(lock)}
end

local function claim(joined, terms)
  local token = grant(lock, owner, ttl, terms, holder)
  count_start(lock, terms)
  write_claim(lock, ticket, {
    joined = joined, claimed = now, settles = IN_BODY, terms = terms,
  })
  return token
end

local function list() if index ~= '' then list_line(index, name) end end

-- Whether the line may not be listed any more when something is put in it.
local function is_unlisted() return index == '' and now_us >= listed + LISTED_US end
local function list_first() return {UNLISTED, turns, string.format('%.0f', now_us)} end

local function put_in_line(joined, terms, its_home, its_message)
  list()
  write_ticket(lock, ticket, {
    joined = joined, times = 0, ttl = ttl, home = its_home, terms = terms, message = its_message,
  })
  join(lock, ticket, joined)
  if lock.early then hand_off(lock) end  -- nobody's release brings its turn, but the time
  return in_line()
end

-- When a message was sent, if its first line says so: our header comes first, as Message.to_bytes() writes it.
local SENT = '^[^\n]*,"headers":{"dislock":{"v":1,"sent":(%d+)'
local function sent_at(stored) return tonumber(string.match(stored, SENT)) end

local function was_sent_before(other)
  local mine, its = sent_at(message), sent_at(redis.call('HGET', lock.tickets, other) or '')
  return mine and its and mine < its
end

local NO_ROOM, ROOM, OLDEST = 0, 1, 2
local TAKEN_MOST = 100    -- that make room for one
local LOOKED_MOST = 1000  -- places, at the head of the line

-- Make room in line for a record of this size; if the line is full, by taking out the oldest, if that is wanted.
-- Returns NO_ROOM, and nothing is changed; ROOM; or OLDEST: the task that comes is the one that makes room.
local function make_room(size)
  local goes, is_oldest = {}, false
  local too_many = most > 0 and waiting() - most + 1 or 0
  local too_long = tonumber(redis.call('HGET', lock.tickets, TOTAL) or 0) + size - most_bytes

  -- If there are far too many tasks, each that comes takes out some of them.  There are never too many bytes.
  local function is_room()
    return too_long <= 0 and (too_many <= 0 or #goes == TAKEN_MOST)
  end

  if is_room() then return ROOM end
  if overflow ~= 'replace' then return NO_ROOM end
  for _, member in ipairs(redis.call('ZRANGE', lock.line, 0, LOOKED_MOST - 1)) do
    if is_oldest or is_room() or #goes == TAKEN_MOST then break end
    local other = is_parked(member) and ticket_of(member)
    is_oldest = other and was_sent_before(other)
    if other and not is_oldest then
      goes[#goes + 1] = other
      too_many, too_long = too_many - 1, too_long - redis.call('HSTRLEN', lock.tickets, other)
    end
  end
  if not (is_oldest or is_room()) then return NO_ROOM end
  for _, other in ipairs(goes) do
    local record = redis.call('HGET', lock.tickets, other)
    local parked = parse_ticket(record)
    if parked then replace(lock, other, parked.message) else set_aside(lock, other, record or '') end
  end
  return is_oldest and OLDEST or ROOM
end

-- It claims its turn before it may start: clocks differ, and others may have started.  It keeps the turn, and
-- comes again then.
local function not_yet(wait_ms, terms)
  renew(lock, lease_of(lock, member_of(ticket)), wait_ms + ttl)
  redis.call('ZADD', lock.handed, now + wait_ms + ttl, ticket)
  return {REFUSED, turns, NO_PLACE, wait_ms, '', as_holder(ticket, as_early(lock, terms)), NOT_KNOWN}
end

-- Its ticket is in line, or has its turn, which it claims.  An unmarked message is acknowledged: it is a copy,
-- or this request is late.  So is one whose delivery is over.
local function parked_before(record)
  local parked = parse_ticket(record)
  local may_claim = not parked or marked ~= '0' and not is_done(lock, owner)
  recall_and_hand_off(lock, may_claim and member_of(ticket))
  if not (may_claim and lease_of(lock, member_of(ticket))) then return in_line() end  -- its turn brings its message
  if parked and parked.is_later then return {LATER, turns} end
  local early = parked and starts_in(lock, parked.terms, 0) or 0
  if early > 0 and early <= SOON_US then return not_yet(math.ceil(early / 1000), parked.terms) end
  forget(lock, ticket)
  if parked and (early > 0 or not admits(lock, parked.terms) and not lock.early) then  -- an operator has changed its terms
    return put_in_line(parked.joined, parked.terms, parked.home, parked.message)
  end
  local token = claim(parked and parked.joined or now_us, parked and parked.terms or terms)
  recall_and_hand_off(lock)  -- shared tasks leave the line together
  return {GRANTED, turns, token, 1}
end

-- It has claimed its turn before.  Unless its result is on its way, that process has died.
local function ran_before(record)
  local before = parse_claim(record)
  if before.settles > now then
    return {REFUSED, turns, NO_PLACE, before.settles - now, '', as_holder(ticket), NOT_KNOWN}
  end
  if admits(lock, before.terms) then
    local token = claim(before.joined, before.terms)
    recall_and_hand_off(lock)  -- what else that process held
    return {GRANTED, turns, token, 1}
  end
  if message == '' then return {REFUSED, turns, waiting() + 1, in_the_way(lock)} end
  if is_unlisted() then return list_first() end
  redis.call('HDEL', lock.running, ticket)
  return put_in_line(before.joined, before.terms, home, message)
end

-- Nothing is known of it.
local function new()
  recall_and_hand_off(lock)
  local was_full = marked == '0' and is_done(lock, owner)  -- so this delivery is over: its request is late
  if not was_full and admits(lock, terms) and not line_exists(lock) then
    -- Of a request that brings the message, a late copy may come when the task is done: it finds a mark.
    if marked ~= '0' or message ~= '' then return {GRANTED, turns, claim(now_us, terms), 1} end
    count_start(lock, terms)
    return {GRANTED, turns, grant(lock, owner, ttl, terms, holder), 0}
  end
  if message == '' then return {REFUSED, turns, waiting() + 1, in_the_way(lock)} end
  if is_unlisted() then return list_first() end
  local room = was_full and NO_ROOM or make_room(#message + 80)  -- with what is written before it
  if room == NO_ROOM then
    if marked == '0' then mark_done(lock, owner) end  -- else it is put off
    return {FULL, turns, waiting(), in_the_way(lock)}
  end
  if room == OLDEST then  -- it is parked, and replaced at once
    list()
    replace(lock, ticket, message)
    return in_line()
  end
  return put_in_line(joins_at(lock), terms, home, message)
end

local mine = lease_of(lock, owner)
if mine then  -- this was sent twice
  renew(lock, mine, ttl)
  return {GRANTED, turns, mine.token, redis.call('HEXISTS', lock.running, ticket)}
end

local parked = redis.call('HGET', lock.tickets, ticket)
local ran = redis.call('HGET', lock.running, ticket)
if not (parked or ran) then
  if message ~= '' and redis.call('HGET', lock.name .. REPLACED, ticket) == message then
    return in_line()  -- sent again, and replaced at once the first time: its end is not reported yet
  end
  if is_done(lock, ticket) or marked ~= '0' and redis.call('HEXISTS', lock.name .. ASIDE, ticket) == 1 then
    return {DONE_BEFORE, turns}
  end
end
if parked and not is_of(parked, task) then  -- another task of this id: that one has the place
  return {REFUSED, turns, NO_PLACE, ttl, '', as_holder(ticket), NOT_KNOWN}
end
local other = leases_of(lock, same_task)[1]  -- of another delivery of this task
if other then return {REFUSED, turns, NO_PLACE, about(other)} end

if parked then return parked_before(parked) end
if ran then return ran_before(ran) end
return new()
