-- _parked.lua: how parked tasks are written.  Included by the scripts that can give parked tasks their turn: these
-- return {lock, ticket, message, delay_ms, ...} for the caller to publish, and know the caller's broker.
--
-- A parked task is known by its ticket, which names one delivery of work: "<task id>:<retries>:..."  The ticket passes
-- its locks one after the other, in the order of its record.  Each lock is a station.  The ticket stands in the line of
-- one lock, and keeps a unit of each lock that it has passed.  In both it goes by its member, the name that member_of()
-- or member_elsewhere() makes.  All other keys are those of its first lock:
--   <lock>:line        the ticket's member, while the ticket waits to pass this lock; see _line.lua
--   <lock>             a lease of that member, once the ticket has passed this lock: the unit that is kept for it
--   <lock>:tickets     ticket -> "1 joined_us times ttl_ms broker length stations message" until its turn is claimed
--                      "bytes" -> length of all these records together
--   <lock>:handed      ticket -> Redis TIME in ms at which its turn ends: it has passed all, and its message is out
--   <lock>:running     ticket -> "1 joined_us claimed_ms settles_ms stations", from its claim until the task is done
--   <lock>:done:<ticket>   the mark of a task that is done, for COPY_MS: a copy that comes later must not run
--   <lock>:done:<owner>    the mark of a delivery that is over, for COPY_MS: it was acknowledged because its ticket
--                          is in line, or it has ended because the line is full; or it runs without a lock
--   <lock>:done:~<ticket>   id of the newer task by which this one was superseded, for COPY_MS; see _newest.lua
--   <lock>:replaced    ticket -> message of a task that was replaced or dropped, until its end is reported
--     joined_us  when the task was parked; the ticket's score in the first line
--     times      how often the ticket was given its turn
--     ttl_ms     of the task's leases, and of the first turn; each later turn is twice as long
--     settles_ms IN_BODY while the body runs; then until when its result and what follows are on their
--                way: a copy that comes meanwhile waits, one that comes later finds that the process died
--     broker     the broker that the message came from: only a worker of that broker can publish it
--     1          version of this format.  Later ones begin with the same fields, up to the length or settles_ms
--     length     of the message, which is last
--     stations   the locks and their terms, on which the leases are granted even if the task's code has changed: of
--                one lock the terms alone; of several a JSON list of [lock, terms, when the ticket came to that line]
--     message    bytes
--
-- When the ticket has passed its last lock, the message is given to the caller to publish.  Its delivery claims the
-- turn.  A turn that nobody has claimed in time is given again, without a gate: others need not wait until a
-- worker takes the message.  A worker in which it waits for Celery's rate_limit keeps the turn; see keep_turn.lua.
-- A line goes by arrival there, so tenants take turns at a lock that they share.
-- The units that a ticket keeps are always of the first locks in its order.  The sweep renews them while it waits.
--
-- Only the mark says that a task is done: a task of which nothing is known may have been lost.  Each task
-- that was parked leaves a mark, as a copy of its message may always come.

-- include: _line
-- include: _newest

local TURNS_MOST = 100           -- turns that one script gives; the script that claims one of them gives more
local KEPT_UNIT_MS = 300000      -- how long a unit is kept if no sweep renews it
local CLAIMED_MS = 604800000     -- seven days in which the copy of a task whose process died may come
local IN_BODY = 0                -- settles_ms of a claim
local TOTAL = 'bytes'            -- the field beside the tickets

local broker                    -- the caller's broker; nothing or empty: the caller cannot publish
local turns = {}                -- given by this script: lock, ticket, message, delay_ms, ...  Without a message the
                                -- record was damaged and is set aside (empty), or is gone (false)
local claimer                   -- {lock, ticket} that claims its turn here: its message need not be published
local opened, behind = {}, {}   -- the locks of this script by name, and those that are still to be handed on
local moves = 0                 -- calls of go_on() that this script has made

-- As check_keys(), at all keys of the lock.
local function check_all_keys(lock)
  check_keys(lock, {PLACES, TICKETS, RUNNING, REPLACED, ASIDE, NEWEST})
  local total = fail_unless_moving(pcall(redis.call, 'HGET', lock.tickets, TOTAL))
  if total and (not string.find(total, '^%-?%d+$') or #total > NUMBER_DIGITS) then
    error('dislock: its count of bytes cannot be read', 0)
  end
end

-- Open a lock, once in a script.  A key of it that is on another node or cannot be read is an error, before anything
-- is changed.
local function open_whole(name)
  if opened[name] then return opened[name] end
  local lock = open(name)
  line_exists(lock)
  check_all_keys(lock)
  opened[name] = lock
  return lock
end

-- The lock of a ticket's nth station, and the ticket's member of it; nothing if the lock cannot be read.
-- *home_lock* is the ticket's first lock.
local function station_of(home_lock, ticket, stations, nth)
  if nth == 1 then return home_lock, member_of(ticket) end
  local seen, lock = pcall(open_whole, stations[nth].name)
  if seen then return lock, member_elsewhere(home_lock.name, ticket) end
end

-- Whether a record is that of a task of this name, as park.lua is given the name; empty: any task.  Whoever knows
-- the id of a task may send another task under that id.
local function is_of(record, task)
  local head = string.match(record, '^[^\n]*')
  local has_name = string.find(head, string.sub(task, 1, #'"task":"'), 1, true)
  return task == '' or not has_name or string.find(head, task, 1, true) ~= nil
end

local function read_ticket(lock, ticket) return parse_ticket(redis.call('HGET', lock.tickets, ticket)) end

local function write_ticket(lock, ticket, parked)
  local record = string.format('%s %.0f %.0f %.0f %s %d ', parked.version or '1', parked.joined, parked.times,
    parked.ttl, parked.broker, #parked.message) .. (parked.between or write_stations(parked.stations)) .. ' ' .. parked.message
  local before = redis.call('HSTRLEN', lock.tickets, ticket)
  redis.call('HSET', lock.tickets, ticket, record)
  redis.call('HINCRBY', lock.tickets, TOTAL, #record - before)
  keep_key(lock.tickets)
end

local function drop_ticket(lock, ticket)
  local before = redis.call('HSTRLEN', lock.tickets, ticket)
  if redis.call('HDEL', lock.tickets, ticket) == 0 then return false end
  if redis.call('HINCRBY', lock.tickets, TOTAL, -before) <= 0 or redis.call('HLEN', lock.tickets) == 1 then
    redis.call('HDEL', lock.tickets, TOTAL)
  end
  return true
end

-- How many tasks wait or have their turn.
local function count_tickets(lock)
  return redis.call('HLEN', lock.tickets) - redis.call('HEXISTS', lock.tickets, TOTAL)
end

local function parse_claim(record)
  local version, joined, claimed, settles, rest = string.match(record, '^(%d+) (%d+) (%d+) (%d+) (.*)$')
  return {
    joined = tonumber(joined) or 0, claimed = tonumber(claimed) or 0, settles = tonumber(settles) or IN_BODY,
    stations = parse_stations(rest or '', tonumber(joined)) or {{terms = ALONE, arrived = 0}}, is_later = version and version ~= '1',
  }
end

local function write_claim(lock, ticket, claim)
  redis.call('HSET', lock.running, ticket, string.format('1 %.0f %.0f %.0f ',
    claim.joined, claim.claimed, claim.settles) ..
    write_stations(claim.stations))
  live_at_least(lock.running, CLAIMED_MS)
end

local function hand_on_later(lock) behind[#behind + 1] = lock end

-- Take a ticket out of the lines of its nth and later stations, and drop the units that it keeps there.
local function give_up(lock, ticket, stations, nth)
  for later = nth, #stations do
    local at, member = station_of(lock, ticket, stations, later)
    local unit = at and lease_of(count_leases(at), member)
    if unit then end_lease(at, unit) end
    local stood = at and redis.call('ZREM', at.line, member) == 1
    if at ~= lock and (unit or stood) then hand_on_later(at) end
  end
end

-- Take a ticket out, wherever it is, and end its turn.  Returns whether it was anywhere.
local function forget(lock, ticket)
  local parked = parse_ticket(redis.call('HGET', lock.tickets, ticket))
  local claim = redis.call('HGET', lock.running, ticket)
  claim = claim and parse_claim(claim)
  give_up(lock, ticket, (parked or claim or {}).stations or {{}}, 1)
  redis.call('ZREM', lock.handed, ticket)
  local was_running = claim and not claim.is_later
  if was_running then redis.call('HDEL', lock.running, ticket) end
  return drop_ticket(lock, ticket) or was_running
end

-- Whether the task of a ticket, or a delivery, is done.
local function is_done(lock, name) return redis.call('EXISTS', lock.name .. DONE .. name) == 1 end
local function mark_done(lock, name) redis.call('SET', lock.name .. DONE .. name, '1', 'PX', COPY_MS) end

-- Take a task out of line that is replaced or dropped.  Its message is kept until the task's end is reported.
local function replace(lock, ticket, message)
  redis.call('HSET', lock.name .. REPLACED, ticket, message)
  keep_key(lock.name .. REPLACED)
  forget(lock, ticket)
  mark_done(lock, ticket)
end

-- Return a turn to the caller.  A delayed message is published now, and delivered after delay_ms.
local function publish(lock, ticket, message, delay_ms)
  for _, part in ipairs({lock.name, ticket, message, delay_ms or 0}) do turns[#turns + 1] = part end
end

-- Take a ticket out of line, and keep its record, or its message, for people to see; false or empty: it is gone.
-- With *is_unread* the caller is told, as nobody else is: the record cannot be read.
local function set_aside(lock, ticket, record, is_unread)
  local has_record = record and record ~= ''
  forget(lock, ticket)
  if is_unread then publish(lock, ticket, has_record and '' or false) end
  if not has_record then return end
  redis.call('HSET', lock.name .. ASIDE, ticket, record)
  keep_key(lock.name .. ASIDE)
end

-- Some of the tasks that were replaced, and whose end is not reported yet: {ticket, message, ...}.
-- They are chosen at random, so that a task whose end cannot be reported does not keep the others waiting.
local function unreported(lock)
  local UNREPORTED_MOST, UNREPORTED_BYTES = 100, 262144  -- in one reply
  local key, found, bytes = lock.name .. REPLACED, {}, 0
  for _, ticket in ipairs(redis.call('HRANDFIELD', key, UNREPORTED_MOST) or {}) do
    local message = redis.call('HGET', key, ticket)
    bytes = bytes + #message
    if #found > 0 and bytes > UNREPORTED_BYTES then break end
    found[#found + 1], found[#found + 2] = ticket, message
  end
  return found
end

-- The holder of a lease that a ticket keeps, for messages.
local function as_holder(ticket, more)
  local holder = more or {}
  holder.id, holder.parked = id_of(ticket), true
  return cjson.encode(holder)
end

-- Whether a parked task may pass a lock: now, or soon if only a rate is in the way.  Turns are given ahead,
-- as claims take time: to all tasks that can start within AHEAD_US, else to one that can start within SOON_US.
local function may_pass(lock, terms)
  if admits(lock, terms) then return true end
  local AHEAD_US = 1000000  -- within which turns are given for all starts
  return lock.early and (lock.early < AHEAD_US or lock.early <= SOON_US and lock.gates == 0)
end

local function is_claimer(lock, ticket) return claimer and claimer.lock == lock and claimer.ticket == ticket end

-- The newest word.  The first ticket in a line goes by the terms for that lock with which a task of its name has asked
-- last: the code may have changed since the ticket was parked.  It has them in its record, and those behind it are
-- given them when they are first, so all in line follow.  A ticket that has passed the lock is judged by what it has; or
-- by the word of its claim, if it starts sooner by that: else all behind it would start before it by a faster one.
--   lock.words   name of a task -> terms: of who asks in this script, or else of the ticket that is or was first
local function say(lock, task, terms)
  if task == '' then return end
  lock.words = lock.words or {}
  lock.words[task] = terms
end

-- The name of a ticket's task, as park.lua is given it; empty: not known.
local function task_of(parked)
  local head = parked.is_later and '' or string.match(parked.message, '^[^\n]*')
  local from, to = string.find((string.gsub(head, '\\.', '__')), '"task":"[^"]*"')  -- a name may have quotes
  return from and string.sub(head, from, to) or ''
end

-- The terms of this word for a task, which keeps its own cost.
local function by_word(word, own)
  local terms = parse_terms(write_rule(word))
  terms.cost, terms.has_cost = own.cost, own.has_cost
  return terms
end

local function follow(lock, station, parked)
  local task = task_of(parked)
  local word = lock.words and lock.words[task]
  if not word then
    if parked.times == 0 then say(lock, task, station.terms) end  -- after a turn it may have older terms than the next
  elseif write_rule(word) ~= write_rule(station.terms) then
    station.terms, parked.has_changed = by_word(word, station.terms), true
  end
end

-- Number of the first station that a ticket cannot pass yet.  If it can pass all: nil, and the microseconds until it
-- may start.
local function next_station(lock, ticket, parked)
  local function is_in_front(at, member, arrived)
    local head, since = unpack(redis.call('ZRANGE', at.line, 0, 0, 'WITHSCORES'))
    return not head or head == member or arrived > 0 and tonumber(since) > arrived
  end

  local early = 0
  for nth, station in ipairs(parked.stations) do
    local at, member = station_of(lock, ticket, parked.stations, nth)
    if not at then return nth end
    if nth > 1 and recall(at) then hand_on_later(at) end  -- recalled tickets may stand before this one
    if lease_of(count_leases(at), member) then
      local wait = starts_in(at, station.terms, 0)
      if limit_set(at) == 0 or wait > SOON_US then return nth end  -- paused since: its message would be put off
      early = math.max(early, wait)
    else
      if not is_in_front(at, member, station.arrived) then return nth end
      follow(at, station, parked)
      local can_publish = nth < #parked.stations or is_claimer(lock, ticket) or parked.broker == broker and #turns < 4 * TURNS_MOST
      if not (can_publish and may_pass(at, station.terms)) then return nth end
      early = math.max(early, at.early or 0)
    end
  end
  return nil, early
end

-- The tickets whose first lock is this one, that keep a unit of it and wait at a later lock: the oldest first.
local function keeping(lock)
  local found, since = {}, {}
  for member, lease in pairs(count_leases(lock).leases) do
    local ticket, beside = ticket_of(member)
    if is_parked(member) and not beside and not redis.call('ZSCORE', lock.handed, ticket) then
      found[#found + 1], since[ticket] = ticket, tonumber(lease.acquired)
    end
  end
  table.sort(found, function(one, another) return since[one] < since[another] end)
  return found
end

-- Whether the ticket has passed all its locks, and still keeps them.
local function has_all(lock, ticket, stations)
  for nth = 1, #stations do
    local at, member = station_of(lock, ticket, stations, nth)
    if not (at and lease_of(count_leases(at), member)) then return false end
  end
  return true
end

-- Keep a unit of each station before the nth for this time; with *has_gates* also a gate of each rate.  *waits* is the
-- lock in whose line the ticket waits.
local function keep_units(lock, ticket, stations, nth, ttl_ms, has_gates, waits)
  for before = 1, nth - 1 do
    local terms, at, member = stations[before].terms, station_of(lock, ticket, stations, before)
    redis.call('ZREM', at.line, member)
    local unit = lease_of(at, member)
    local keeps_gate = has_gates and (rate_of(at, terms) or starts_in(at, terms, 0) > 0)
    local holder = as_holder(ticket, {gate = keeps_gate and write_rule(terms) or nil, waits = waits})
    local lasts = before > 1 and ttl_ms + KEPT_UNIT_MS or ttl_ms
    local is_fresh = unit and waits and unit.holder == holder and unit.expires > now + lasts / 2
    if not unit then grant(at, member, lasts, terms, holder)
    elseif not is_fresh then
      put(at, unit, {expires = now + lasts, holder = holder})
      live_at_least(at.name, lasts)
    end
  end
end

-- Let a ticket have its turn for this time from now, or for longer if it has that already, with a unit of each lock, as
-- keep_units() keeps it.
local function keep_turn(lock, ticket, parked, lasts, has_gates)
  lasts = math.max(lasts, (redis.call('ZSCORE', lock.handed, ticket) or 0) - now)
  keep_units(lock, ticket, parked.stations, #parked.stations + 1, lasts, has_gates)
  redis.call('ZADD', lock.handed, now + lasts, ticket)
  keep_key(lock.handed)
end

-- Take a ticket along its stations as far as they admit it, and give it its turn if it has passed them all.
-- Safe at any time: units that it keeps stay, and if one was lost, the ticket goes back to the line of that lock.
-- Returns the lock at which the ticket waits; nil if it has its turn.
local function go_on(lock, ticket, parked)
  if redis.call('ZSCORE', lock.handed, ticket) and not is_claimer(lock, ticket) then return end
  moves = moves + 1
  local nth, early = next_station(lock, ticket, parked)
  local stations = parked.stations
  if nth then
    local at, member = station_of(lock, ticket, stations, nth)
    if is_claimer(lock, ticket) then redis.call('ZREM', lock.handed, ticket) end  -- a lease of its turn was lost
    keep_units(lock, ticket, stations, nth, KEPT_UNIT_MS, parked.times == 0, nth > 1 and stations[nth].name)
    give_up(lock, ticket, stations, at and lease_of(at, member) and nth or nth + 1)
    local joins = at and not redis.call('ZSCORE', at.line, member)
    if joins and stations[nth].arrived == 0 then stations[nth].arrived, parked.has_changed = joins_at(at), true end
    if parked.has_changed then write_ticket(lock, ticket, parked) end
    if joins then join(at, member, stations[nth].arrived) end
    return at
  end
  local TURN_MOST_MS = 300000  -- longest turn
  local delay = math.ceil(early / 1000)
  local lasts = delay + math.min(parked.ttl * 2 ^ parked.times, math.max(parked.ttl, TURN_MOST_MS))
  keep_turn(lock, ticket, parked, lasts, parked.times == 0)
  parked.times = parked.times + 1
  write_ticket(lock, ticket, parked)
  if not is_claimer(lock, ticket) then publish(lock, ticket, parked.message, delay) end
end

function give_turn(lock, member)
  local MOVES_MOST = 200  -- calls of go_on() in one script; the sweep does the rest
  local ticket, beside = ticket_of(member)
  local home_lock = lock
  if beside then
    local seen, other = pcall(open_whole, beside)
    home_lock = seen and other
  end
  local record = home_lock and redis.call('HGET', home_lock.tickets, ticket)
  local parked = parse_ticket(record)
  if parked and not redis.call('ZSCORE', home_lock.handed, ticket) then
    if moves >= MOVES_MOST then return false end
    go_on(home_lock, ticket, parked)
    return not redis.call('ZSCORE', lock.line, member)
  end
  redis.call('ZREM', lock.line, member)
  if not (beside or parked) then set_aside(lock, ticket, record, true) end
  return true
end

-- Hand on the locks that tickets have given up, to whom stands first: perhaps one whose turn has run out.
local function hand_on_all()
  while behind[1] do
    local lock = table.remove(behind)
    recall(lock)
    hand_off(lock)
  end
end

local function recall_and_hand_off(lock)
  hand_on_later(lock)
  hand_on_all()
end

-- Have a ticket begin anew, at the end of its first line, without anything that it has kept.
local function arrive_anew(lock, ticket, parked)
  give_up(lock, ticket, parked.stations, 1)
  redis.call('ZREM', lock.handed, ticket)
  for _, station in ipairs(parked.stations) do station.arrived = 0 end
  parked.joined = joins_at(lock)
  parked.stations[1].arrived = parked.joined
  write_ticket(lock, ticket, parked)
  join(lock, member_of(ticket), parked.joined)
end
