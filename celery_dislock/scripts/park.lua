-- park.lua: take a lock for a task, or park it in line.
--
-- KEYS      the task's locks, in the order in which the task passes them; its ticket is kept beside the first
-- ARGV      owner, ttl_ms, holder, terms   as for acquire.lua
--           from_broker, ticket
--           marked     0: the message does not say that it was parked   1: it does; if nothing is known of
--                      the task, as after a failover, the task runs or is parked again
--           message    empty: only ask
--           most, most_bytes   how many tasks may wait in line, 0: any number; how long their records may be together
--           overflow   if the line is full: skip: refuse the newcomer   replace: the oldest task makes room; that
--                      is the newcomer, if its message was sent before that of the first in line
--           task       name of the task: "task":"...", as its message writes it; empty: not known
--           heeded     1: the terms are what the task's code says of these locks, and hold for the first in their
--                      lines, too, if that is a task of this name; see _parked.lua   0: the code names other locks
--           sent       when the message was sent, by the sender's clock, in microseconds.  The task supersedes tasks
--                      that were sent before it, and is superseded by one that was sent after it; empty: neither
--           index      of lines, see _index.lua; empty: it is on another node, and the client lists the line
--           listed     Redis TIME in microseconds of this node before the client listed the line; 0: not listed yet
--
-- Returns   {state, turns, ...}
--   {1, turns, claimed, lock, token, ...}   granted, each lock with its token; claimed: 1 a parked task's turn
--                                           0 no ticket
--   {0, turns, lock, place, lease...}       refused by this lock; place: the task's, if it were put in line;
--                                           lease: the one in the way, five values as in_the_way() returns them
--   {2, turns, lock, place, lease..., replaced, told}   parked, in the line of this lock; replaced: {ticket,
--                                           message, ...}; told: holders that must end for this task
--   {3, turns}                              a mark says that this work is done; or it was set aside
--   {4, turns, lock, waiting, lease...}     the line is full, or was when this owner asked before
--   {5, turns, task}                        superseded by this task, which was sent later; taken out of line
--   {7, turns}                              parked by a later version: only a worker of that can claim the turn
--   {6, turns, listed}                      not put in line: list the line, and ask again with this time
-- Touches all keys of the locks, and the index.  A task that waits already keeps its place, and so does one whose
-- process died while the task ran.  A parked task is granted the locks on the terms of its ticket, not on those of
-- the request.  most and most_bytes are limits of the first line, and count all tickets beside that lock.
-- Safe to send twice: the owner is given the same tokens, the ticket has the same place.

-- include: _states
-- include: _free

local owner, ttl, holder, terms, from_broker, ticket, marked, message, most, most_bytes,
  overflow, task, heeded, sent, index, listed = unpack(ARGV)
ttl = tonumber(ttl)
local name = KEYS[1]
local free = #KEYS == 1 and marked == '0' and message == '' and sent == ''
  and is_free(name, name .. LINE, name .. TICKETS, name .. HANDED, name .. RUNNING, name .. DONE .. ticket,
    name .. DONE .. owner)
if free and string.match(terms, PLAIN_TERMS) then
  return {GRANTED, {}, 0, name, grant_free(name, owner, ttl, string.sub(terms, 1, 1), holder)}
end

-- include: _starts

if free then
  local mode = start_free(name, terms)
  if mode then return {GRANTED, {}, 0, name, grant_free(name, owner, ttl, mode, holder)} end
end

-- include: _parked
-- include: _index

broker, most, most_bytes = from_broker, tonumber(most), tonumber(most_bytes)

local canceller = sent ~= '' and {sent = math.min(tonumber(sent), now_us), terms = terms, task = id_of(ticket)}

local NO_PLACE = 0  -- the place, in a refusal of a task that is not put in line
local lock = open_whole(name)
local asked = {}
do
  local words = string.gmatch(terms, '[^,]+')  -- terms of each lock, or of all
  local word
  for nth, key in ipairs(KEYS) do
    word = words() or word
    asked[nth] = {name = key, terms = parse_terms(word), arrived = 0}
    local at = open_whole(key)
    if heeded == '1' then say(at, task, asked[nth].terms) end
  end
end

-- How many tasks wait for their turn.  For a task that supersedes others, also those that have their turn.
local function waiting()
  return count_tickets(lock) - (canceller and 0 or redis.call('ZCARD', lock.handed))
end

-- A reply about a lock that is in the way.
local function about_lock(state, its, place)
  return {state, turns, its.name, place, in_the_way(its, owner)}
end

-- Microseconds until a ticket that has passed all its locks may start, and the lock whose rate sets this time.
local function starts_when(stations)
  local early, its = 0, nil
  for nth, station in ipairs(stations) do
    local at = station_of(lock, ticket, stations, nth)
    local wait = at and starts_in(at, station.terms, 0) or 0
    local word = wait > 0 and heeded == '1' and asked[nth]
    if word and word.name == at.name then
      local terms = by_word(word.terms, station.terms)
      local sooner = starts_in(at, terms, 0)
      if sooner < wait then station.terms, wait = terms, sooner end
    end
    if wait > early then early, its = wait, {lock = at, terms = station.terms} end
  end
  return early, its
end

-- A reply about a rate that is in the way of a task that has its turn.
local function about_rate(state, its, wait_ms)
  return {state, turns, its.lock.name, NO_PLACE, wait_ms, '', as_holder(ticket, as_early(its.lock, its.terms)), NOT_KNOWN, 1}
end

-- Answer that the task is in line: this delivery is over.  If it could have claimed a turn, it is marked as done:
-- a late copy of this request would claim the turn, and nobody would read the reply.
local function in_line()
  hand_on_all()
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
  local early, of = 0, nil
  if parked and redis.call('ZSCORE', lock.handed, ticket) then early, of = starts_when(parked.stations) end
  local answer = of and about_rate(PARKED, of, math.ceil(early / 1000))
    or about_lock(PARKED, its, rank and rank + 1 or waiting())
  answer[#answer + 1] = message ~= '' and unreported(lock) or {}
  answer[#answer + 1] = canceller and rank and supersede(its, canceller) or {}
  return answer
end

local function grant_all(stations, claimed)
  if canceller then become_newest(lock, canceller, 'began') end
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


-- Whether the line may be missing from the index: the client has not listed it, or too long ago.
local function is_unlisted() return index == '' and now_us >= listed + LISTED_US end

local function put_in_line(joined, stations, from_broker, its_message)
  if index ~= '' then list_line(index, name) end
  if canceller then become_newest(lock, canceller, 'waits') end
  stations[1].arrived = joined
  local parked = {joined = joined, times = 0, ttl = ttl, broker = from_broker, stations = stations, message = its_message}
  write_ticket(lock, ticket, parked)
  go_on(lock, ticket, parked)
  return in_line()
end

-- Make room in line for a record of this size.  From a full line the oldest tasks are taken out, with "replace".
-- Returns whether there is room, and whether the newcomer is the oldest, and makes room itself.
local function make_room(size)
  local TAKEN_MOST = 100    -- tickets that are taken out for one newcomer
  local LOOKED_MOST = 1000  -- places at the head of the line

  -- When a message was sent, if that is known; see Message.to_bytes().
  local function sent_at(stored)
    local sent = tonumber(string.match(stored, '^%d+ {"sent":(%d+)'))
    return sent ~= 0 and sent
  end

  local function was_sent_before(other)
    local parked = read_ticket(lock, other)
    local mine, its = sent_at(message), parked and sent_at(parked.message)
    return mine and its and mine < its
  end

  -- Tickets that wait, the oldest first: those that have passed this lock and wait at a later one, then this line.
  local function waiting_longest()
    local found = keeping(lock)
    for _, other in ipairs(canceller and redis.call('ZRANGE', lock.handed, 0, -1) or {}) do found[#found + 1] = other end
    for _, member in ipairs(redis.call('ZRANGE', lock.line, 0, LOOKED_MOST - 1)) do
      local other, beside = ticket_of(member)
      if is_parked(member) and not beside then found[#found + 1] = other end
    end
    return found
  end

  local goes, is_oldest = {}, false
  local too_many = most > 0 and waiting() - most + 1 or 0
  local too_long = tonumber(redis.call('HGET', lock.tickets, TOTAL) or 0) + size - most_bytes

  -- If there are far too many tasks, as after a limit was lowered, each newcomer takes out TAKEN_MOST of them.
  -- most_bytes always holds.
  local function is_room()
    return too_long <= 0 and (too_many <= 0 or #goes == TAKEN_MOST)
  end

  if is_room() then return true end
  if overflow ~= 'replace' then return false end
  for _, other in ipairs(waiting_longest()) do
    if is_oldest or is_room() or #goes == TAKEN_MOST then break end
    is_oldest = not canceller and was_sent_before(other)  -- else it is the newest, as newer_than() says
    if not is_oldest then
      goes[#goes + 1] = other
      too_many, too_long = too_many - 1, too_long - redis.call('HSTRLEN', lock.tickets, other)
    end
  end
  if not (is_oldest or is_room()) then return false end
  for _, other in ipairs(goes) do
    local record = redis.call('HGET', lock.tickets, other)
    local parked = parse_ticket(record)
    if parked then replace(lock, other, parked.message) else set_aside(lock, other, record, true) end
  end
  return true, is_oldest
end

-- The task was parked before: it waits, or has its turn, which this message claims.  An unmarked message is
-- acknowledged, as it is a copy, or this request is late; so is a message whose delivery is over.
local function parked_before(record)
  -- Whether a task loses what it has passed, as an operator has lowered the limit since.  Its own limit was judged then:
  -- others may have come since, on terms that admit more.
  local function is_over_limit(stations)
    for nth, station in ipairs(stations) do
      local at = nth == 1 and lock or open_whole(station.name)
      local limit = limit_set(count_leases(at))
      if is_hidden(at) or limit and not has_room(at, station.terms, limit) then return true end
    end
  end

  local parked = parse_ticket(record)
  local may_claim = not parked or marked ~= '0' and not is_done(lock, owner)
  if may_claim then claimer = {lock = lock, ticket = ticket} end
  for nth = 2, #asked do  -- heeded by those in the other lines, too
    local its = parked and parked.stations[nth]
    local differs = not its or write_rule(its.terms) ~= write_rule(asked[nth].terms)
    if heeded == '1' and differs then hand_on_later(open_whole(asked[nth].name)) end
  end
  recall_and_hand_off(lock)
  if parked and may_claim then
    parked = read_ticket(lock, ticket)
    if not has_all(lock, ticket, parked.stations) then
      go_on(lock, ticket, parked)
      hand_on_all()
      parked = read_ticket(lock, ticket)
    end
  end
  local stations = parked and parked.stations or asked
  if not (may_claim and has_all(lock, ticket, stations)) then return in_line() end  -- its turn brings its message
  if parked and parked.is_later then return {LATER, turns} end
  local early, its = starts_when(stations)
  if parked and early > 0 and early <= SOON_US then
    -- Clocks differ, and others may have started.  The task keeps its turn, and its message comes again after wait_ms.
    local wait_ms = math.ceil(early / 1000)
    keep_turn(lock, ticket, parked, wait_ms + ttl, parked.times == 1)
    return about_rate(REFUSED, its, wait_ms)
  end
  forget(lock, ticket)
  if parked and (early > 0 or is_over_limit(stations)) then  -- an operator has changed a limit or a rate
    return put_in_line(parked.joined, stations, parked.broker, parked.message)
  end
  local answer = claim(parked and parked.joined or now_us, stations)
  recall_and_hand_off(lock)  -- shared tasks leave the line together
  return answer
end

-- The task has claimed its turn before.  Unless its result is on its way, the process that ran it has died.
local function ran_before(record)
  local before = parse_claim(record)
  if before.settles > now then
    return {REFUSED, turns, name, NO_PLACE, before.settles - now, '', as_holder(ticket), NOT_KNOWN, 1}
  end
  local its  -- the first lock that does not admit this task
  for nth, station in ipairs(before.stations) do
    local at = nth == 1 and lock or open_whole(station.name)
    its = its or not admits(at, station.terms) and at
  end
  if not its then
    local answer = claim(before.joined, before.stations)
    recall_and_hand_off(lock)  -- whatever else that process held
    return answer
  end
  if message == '' then return about_lock(REFUSED, its, waiting() + 1) end
  if is_unlisted() then return {UNLISTED, turns, string.format('%.0f', now_us)} end
  redis.call('HDEL', lock.running, ticket)
  return put_in_line(before.joined, before.stations, broker, message)
end

-- Nothing is known of this task.  *otherwise* is called if the task does not get its locks at once.
local function new(otherwise)
  local its
  for _, station in ipairs(asked) do recall_and_hand_off(open_whole(station.name)) end
  for _, station in ipairs(asked) do  -- not before: who passes a later lock may take an earlier one
    local at = open_whole(station.name)
    if not its and (not admits(at, station.terms) or line_exists(at)) then its = at end
  end
  local was_full = marked == '0' and is_done(lock, owner)  -- this delivery was refused before: the request is late
  if not (was_full or its) then
    -- A late copy of a request that brings the message may come when the task is done: a claim leaves a mark for it.
    if marked ~= '0' or message ~= '' then return claim(now_us, asked) end
    return grant_all(asked, 0)
  end
  if otherwise then return otherwise() end
  its = its or lock
  if message == '' then return about_lock(REFUSED, its, waiting() + 1) end
  if is_unlisted() then return {UNLISTED, turns, string.format('%.0f', now_us)} end
  local room, is_oldest
  if not was_full then room, is_oldest = make_room(#message + 80) end  -- with the fields before the message
  if not room then
    if marked == '0' then mark_done(lock, owner) end  -- a marked message is put off, and asks again
    return about_lock(FULL, its, waiting())
  end
  if is_oldest then  -- the newcomer is parked, and replaced at once
    if index ~= '' then list_line(index, name) end
    replace(lock, ticket, message)
    return in_line()
  end
  return put_in_line(joins_at(lock), asked, broker, message)
end

-- The owner has the locks already: the request was sent twice.
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
      return in_line()  -- the request was sent twice, and the first one replaced this task at once
    end
    -- A request that brings the message that was set aside is late: the one sent in its place has parked the task.
    local aside = (marked ~= '0' or message ~= '') and redis.call('HGET', lock.name .. ASIDE, ticket)
    if is_done(lock, ticket) or aside and (marked ~= '0' or string.sub(aside, -#message) == message) then
      return {DONE_BEFORE, turns}
    end
  end
  if parked and not is_of(parked, task) then  -- the ticket is that of another task with the same id
    return {REFUSED, turns, name, NO_PLACE, ttl, '', as_holder(ticket), NOT_KNOWN, 1}
  end
  local other = copy_of(lock, owner)
  if other then return {REFUSED, turns, name, NO_PLACE, about(other, owner)} end

  local told_key = lock.name .. DONE .. '~' .. ticket  -- once it was told so, no copy of it may run
  local told_before = canceller and redis.call('GET', told_key)
  local newer = told_before or canceller and newer_than(lock, canceller)
  local function superseded()
    redis.call('SET', told_key, newer, 'PX', COPY_MS)
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

return answer()
