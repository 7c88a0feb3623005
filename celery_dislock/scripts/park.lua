-- park.lua: take a lock for a task, or park it in line.
--
-- KEYS      its locks, in the order in which it passes them; the first has its ticket
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
--           sent       when its message was sent, Redis TIME in microseconds: it supersedes those that were sent before,
--                      and one that comes when a newer one came before it is superseded; empty: neither
--           index      of lines, see _index.lua; empty: on another node, and the client lists the line
--           listed     Redis TIME in microseconds of this node before that; 0: it is not listed yet
--
-- Returns   {state, turns, ...}
--   {1, turns, claimed, lock, token, ...}   granted, each lock with its token; claimed: 1 a parked task's turn
--                                           0 no ticket
--   {0, turns, lock, place, lease...}       refused; place: that it would have in line; lock: the one that refuses;
--                                           lease: the one in the way, four values as in_the_way() has them
--   {2, turns, lock, place, lease..., replaced, told}   parked, in the line of this lock; replaced: {ticket,
--                                           message, ...}; told: holders that must end for it
--   {3, turns}                              this work is done: a mark says so, and nothing else does
--   {4, turns, lock, waiting, lease...}     the line is full, or was when this owner asked before
--   {5, turns, task}                        it is superseded: this task was sent later; it leaves its line
--   {7, turns}                              a later version has parked it: only that can claim its turn
--   {6, turns, listed}                      it was not put in line: list the line, and ask again with this time
-- Touches all keys of the locks, and the index.  A task that waits already keeps its place, and so does one that ran in a
-- process that died.  Who was parked is granted the locks on the terms of its ticket, not those that are asked for.
-- Bounds are those of the first line, and count all whose ticket is there.
-- Safe to send twice: the owner is given the same tokens, the ticket has the same place.

-- include: _states
-- include: _free

local owner, ttl, holder, terms, its_home, ticket, same_task, marked, message, most, most_bytes,
  overflow, task, sent, index, listed = unpack(ARGV)
ttl = tonumber(ttl)
local name = KEYS[1]
if #KEYS == 1 and marked == '0' and message == '' and sent == '' then
  local free = grant_free(name, owner, ttl, terms, holder, LINE, TICKETS, HANDED, RUNNING, DONE .. ticket)
  if free then return {GRANTED, {}, 0, name, free} end
end

-- include: _parked
-- include: _index

home, most, most_bytes = its_home, tonumber(most), tonumber(most_bytes)

local this = sent ~= '' and {sent = math.min(tonumber(sent), now_us), terms = terms, task = string.sub(same_task, 1, -2)}

local NO_PLACE = 0  -- that it would have in line: another delivery of its task is in the way
local lock = open_whole(name)
local asked = {}
do
  local words = string.gmatch(terms, '[^,]+')  -- one for each lock, or one for all
  local word
  for nth, key in ipairs(KEYS) do
    word = words() or word
    asked[nth] = {name = key, terms = parse_terms(word), arrived = 0}
    open_whole(key)
  end
end

-- How many wait for their turn; for a task that supersedes them, also those that have it.
local function waiting()
  return count_tickets(lock) - (this and 0 or redis.call('ZCARD', lock.handed))
end

-- A reply about a lock that is in the way.
local function about_lock(state, its, place)
  local lasts, its_owner, its_holder, held = in_the_way(its)
  return {state, turns, its.name, place, lasts, its_owner, its_holder, held}
end

-- This delivery is over.  If it could claim a turn, a late copy of its request must not: for nobody.
local function in_line()
  if marked ~= '0' then mark_done(lock, owner) end
  local parked, its, rank = read_ticket(lock, ticket), lock, nil
  for nth = 1, parked and #parked.stations or 0 do
    local at, member = station_of(lock, ticket, parked.stations, nth)
    rank = at and redis.call('ZRANK', at.line, member)
    if rank then
      its = at
      break
    end
  end
  local answer = about_lock(PARKED, its, rank and rank + 1 or waiting())
  answer[#answer + 1] = message ~= '' and unreported(lock) or {}
  answer[#answer + 1] = this and rank and supersede(its, this) or {}
  return answer
end

-- The first of these locks that does not admit this task, with *whenever* but for the time.
local function refusing(stations, whenever)
  for nth, station in ipairs(stations) do
    local at = nth == 1 and lock or open_whole(station.name)
    if not admits(at, station.terms) and not (whenever and at.early) then return at end
  end
end

local function grant_all(stations, claimed)
  if this then become_newest(lock, this, 'began') end
  local answer = {GRANTED, turns, claimed}
  for nth, station in ipairs(stations) do
    local at = nth == 1 and lock or open_whole(station.name)
    answer[#answer + 1], answer[#answer + 2] = at.name, grant(at, owner, ttl, station.terms, holder)
    count_start(at, station.terms)
  end
  return answer
end

local function claim(joined, stations)
  local answer = grant_all(stations, 1)
  write_claim(lock, ticket, {joined = joined, claimed = now, settles = IN_BODY, stations = stations})
  return answer
end

local function list() if index ~= '' then list_line(index, name) end end

-- Whether the line may not be listed any more when something is put in it.
local function is_unlisted() return index == '' and now_us >= listed + LISTED_US end
local function list_first() return {UNLISTED, turns, string.format('%.0f', now_us)} end

local function put_in_line(joined, stations, its_home, its_message)
  list()
  if this then become_newest(lock, this, 'waits') end
  stations[1].arrived = joined
  local parked = {joined = joined, times = 0, ttl = ttl, home = its_home, stations = stations, message = its_message}
  write_ticket(lock, ticket, parked)
  go_on(lock, ticket, parked)
  return in_line()
end

local NO_ROOM, ROOM, OLDEST = 0, 1, 2
-- Make room in line for a record of this size; if the line is full, by taking out the oldest, if that is wanted.
-- Returns NO_ROOM, and nothing is changed; ROOM; or OLDEST: the task that comes is the one that makes room.
local function make_room(size)
  local TAKEN_MOST = 100    -- that make room for one
  local LOOKED_MOST = 1000  -- places, at the head of the line

  -- When a message was sent, if its first line says so: our header comes first, as Message.to_bytes() writes it.
  local function sent_at(stored)
    return tonumber(string.match(stored, '^[^\n]*,"headers":{"dislock":{"v":1,"sent":(%d+)'))
  end

  local function was_sent_before(other)
    local mine, its = sent_at(message), sent_at(redis.call('HGET', lock.tickets, other) or '')
    return mine and its and mine < its
  end

  -- Tickets that wait, the oldest first: those that have passed this lock and wait at a later one, then its line.
  local function waiting_longest()
    local found = keeping(lock)
    for _, other in ipairs(this and redis.call('ZRANGE', lock.handed, 0, -1) or {}) do found[#found + 1] = other end
    for _, member in ipairs(redis.call('ZRANGE', lock.line, 0, LOOKED_MOST - 1)) do
      local other, beside = ticket_of(member)
      if is_parked(member) and not beside then found[#found + 1] = other end
    end
    return found
  end

  local goes, is_oldest = {}, false
  local too_many = most > 0 and waiting() - most + 1 or 0
  local too_long = tonumber(redis.call('HGET', lock.tickets, TOTAL) or 0) + size - most_bytes

  -- If there are far too many tasks, each that comes takes out some of them.  There are never too many bytes.
  local function is_room()
    return too_long <= 0 and (too_many <= 0 or #goes == TAKEN_MOST)
  end

  if is_room() then return ROOM end
  if overflow ~= 'replace' then return NO_ROOM end
  for _, other in ipairs(waiting_longest()) do
    if is_oldest or is_room() or #goes == TAKEN_MOST then break end
    is_oldest = not this and was_sent_before(other)  -- else it is the newest, as newer_than() says
    if not is_oldest then
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
local function not_yet(wait_ms, parked, its)
  keep_units(lock, ticket, parked.stations, #parked.stations + 1, wait_ms + ttl, parked.times == 1)
  redis.call('ZADD', lock.handed, now + wait_ms + ttl, ticket)
  local early = as_holder(ticket, as_early(its.lock, its.terms))
  return {REFUSED, turns, its.lock.name, NO_PLACE, wait_ms, '', early, NOT_KNOWN}
end

-- Microseconds until a ticket that has passed all its locks may start, and the one that says so.
local function starts_when(stations)
  local early, its = 0, nil
  for nth, station in ipairs(stations) do
    local at = station_of(lock, ticket, stations, nth)
    local wait = starts_in(at, station.terms, 0)
    if wait > early then early, its = wait, {lock = at, terms = station.terms} end
  end
  return early, its
end

-- Whether it has passed all its locks, and still keeps what it has passed.
local function has_all(stations)
  for nth = 1, #stations do
    local at, member = station_of(lock, ticket, stations, nth)
    if not (at and lease_of(count_leases(at), member)) then return false end
  end
  return true
end

-- Its ticket is in line, or has its turn, which it claims.  An unmarked message is acknowledged: it is a copy,
-- or this request is late.  So is one whose delivery is over.
local function parked_before(record)
  local parked = parse_ticket(record)
  local may_claim = not parked or marked ~= '0' and not is_done(lock, owner)
  if may_claim then claimer = {lock = lock, ticket = ticket} end
  recall_and_hand_off(lock)
  if parked and may_claim then
    parked = read_ticket(lock, ticket)
    if not has_all(parked.stations) then go_on(lock, ticket, parked) end
  end
  local stations = parked and parked.stations or asked
  if not (may_claim and has_all(stations)) then return in_line() end  -- its turn brings its message
  if parked and parked.is_later then return {LATER, turns} end
  local early, its = starts_when(stations)
  if parked and early > 0 and early <= SOON_US then return not_yet(math.ceil(early / 1000), parked, its) end
  forget(lock, ticket)
  if parked and (early > 0 or refusing(stations, true)) then  -- an operator has changed its terms
    return put_in_line(parked.joined, stations, parked.home, parked.message)
  end
  local answer = claim(parked and parked.joined or now_us, stations)
  recall_and_hand_off(lock)  -- shared tasks leave the line together
  return answer
end

-- It has claimed its turn before.  Unless its result is on its way, that process has died.
local function ran_before(record)
  local before = parse_claim(record)
  if before.settles > now then
    return {REFUSED, turns, name, NO_PLACE, before.settles - now, '', as_holder(ticket), NOT_KNOWN}
  end
  local its = refusing(before.stations)
  if not its then
    local answer = claim(before.joined, before.stations)
    recall_and_hand_off(lock)  -- what else that process held
    return answer
  end
  if message == '' then return about_lock(REFUSED, its, waiting() + 1) end
  if is_unlisted() then return list_first() end
  redis.call('HDEL', lock.running, ticket)
  return put_in_line(before.joined, before.stations, home, message)
end

-- Nothing is known of it.  *otherwise* is called if it does not get the lock at once.
local function new(otherwise)
  local its
  for _, station in ipairs(asked) do
    local at = open_whole(station.name)
    recall_and_hand_off(at)
    if not its and (not admits(at, station.terms) or line_exists(at)) then its = at end
  end
  local was_full = marked == '0' and is_done(lock, owner)  -- so this delivery is over: its request is late
  if not (was_full or its) then
    -- Of a request that brings the message, a late copy may come when the task is done: it finds a mark.
    if marked ~= '0' or message ~= '' then return claim(now_us, asked) end
    return grant_all(asked, 0)
  end
  if otherwise then return otherwise() end
  its = its or lock
  if message == '' then return about_lock(REFUSED, its, waiting() + 1) end
  if is_unlisted() then return list_first() end
  local room = was_full and NO_ROOM or make_room(#message + 80)  -- with what is written before it
  if room == NO_ROOM then
    if marked == '0' then mark_done(lock, owner) end  -- else it is put off
    return about_lock(FULL, its, waiting())
  end
  if room == OLDEST then  -- it is parked, and replaced at once
    list()
    replace(lock, ticket, message)
    return in_line()
  end
  return put_in_line(joins_at(lock), asked, home, message)
end

-- The same owner has what it asks for: this was sent twice.
local function granted_before(ran)
  local answer = {GRANTED, turns, ran and 1 or 0}
  for nth, station in ipairs(ran and parse_claim(ran).stations or asked) do
    local at = nth == 1 and lock or open_whole(station.name)
    local mine = lease_of(at, owner)
    if not mine then return nil end
    renew(at, mine, ttl)
    answer[#answer + 1], answer[#answer + 2] = at.name, mine.token
  end
  return answer
end

local function answer()
  local parked = redis.call('HGET', lock.tickets, ticket)
  local ran = redis.call('HGET', lock.running, ticket)
  local before = lease_of(lock, owner) and granted_before(ran)
  if before then return before end
  if not (parked or ran) then
    if message ~= '' and redis.call('HGET', lock.name .. REPLACED, ticket) == message then
      return in_line()  -- sent again, and replaced at once the first time: its end is not reported yet
    end
    if is_done(lock, ticket) or marked ~= '0' and redis.call('HEXISTS', lock.name .. ASIDE, ticket) == 1 then
      return {DONE_BEFORE, turns}
    end
  end
  if parked and not is_of(parked, task) then  -- another task of this id: that one has the place
    return {REFUSED, turns, name, NO_PLACE, ttl, '', as_holder(ticket), NOT_KNOWN}
  end
  local other = leases_of(lock, same_task)[1]  -- of another delivery of this task
  if other then return {REFUSED, turns, name, NO_PLACE, about(other)} end

  local told = lock.name .. DONE .. '~' .. ticket  -- once it was told so, no copy of it may run
  local told_before = this and redis.call('GET', told)
  local newer = told_before or this and newer_than(lock, this)
  local function superseded()
    redis.call('SET', told, newer, 'PX', COPY_MS)
    forget(lock, ticket)
    recall_and_hand_off(lock)
    return {REPLACED_BY, turns, newer}
  end
  if newer and not (ran and parse_claim(ran).settles > now) then
    -- It may run beside newer ones, if the lock admits several and there is room.
    local several = asked[1].terms.mode == 's' or (limit_set(lock) or asked[1].terms.limit) > 1
    if told_before or parked or ran or not several then return superseded() end
    return new(superseded)
  end
  if parked then return parked_before(parked) end
  if ran then return ran_before(ran) end
  return new()
end

local told = answer()
hand_on_all()
return told
