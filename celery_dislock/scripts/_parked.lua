-- _parked.lua: how parked tasks are written.  Included by the scripts that can give them their turn: these return
-- {lock, ticket, message, delay_ms, ...} for the caller to publish, and know its broker as its home.
--
-- A parked task is known by its ticket, which names one delivery of work: "<task id>:<retries>:..."
--   <lock>:line        has "<ticket>#" while it waits for its turn
--   <lock>:tickets     ticket -> "1 joined_us times ttl_ms home length terms message" until its turn is claimed
--                      "bytes" -> length of all these records together
--   <lock>:running     ticket -> "1 joined_us claimed_ms settles_ms terms", from its claim until it is done
--   <lock>:done:<ticket>   from then on for COPY_MS: its mark; a copy that comes later must not run
--   <lock>:done:<owner>    for COPY_MS: a delivery that was acknowledged as its ticket is in line, or that
--                          has ended as the line is full
--   <lock>:replaced    until the end of a task is reported whose place another has taken
--     joined_us  when it was parked, its score in the line
--     times      how often it was given its turn
--     ttl_ms     of its lease, and of its first turn; each later turn is twice as long
--     settles_ms IN_BODY while its body runs; then until when its result and what follows are on their
--                way: a copy that comes meanwhile waits, one that comes later finds that its process died
--     home       the broker that its message came from: a worker of another one cannot publish it
--     1          version of this format.  Later ones begin with the same fields, up to the length or settles_ms
--     length     of the message, which is last
--     terms      of the lease that it waits for: it is granted on these terms, whatever its code says by now
--     message    bytes
--
-- During a turn a lease of the owner "<ticket>#" holds the lock.  The message is given to the caller to
-- publish; the task that gets it claims the turn.  A turn that nobody has claimed in time is given again, and
-- keeps no gate then: others need not wait for its queue.
--
-- Only the mark says that a task is done: one of which nothing is known may have been lost.  Each task
-- that was parked leaves a mark, as a copy of its message may always come.

-- include: _line

local TURNS_MOST = 100           -- given by one script; the script that claims one of them gives more
local TURN_MOST_MS = 300000      -- longest turn
local CLAIMED_MS = 604800000     -- seven days in which the copy of a task whose process died may come
local UNREPORTED_MOST, UNREPORTED_BYTES = 100, 262144  -- replaced tasks in one reply
local IN_BODY = 0                -- settles_ms of a claim
local TOTAL = 'bytes'            -- the field beside the tickets

local home                      -- the caller's; nothing or empty: it cannot publish
local turns = {}                -- given here: lock, ticket, message, delay_ms, and so on; no message: its record
                                -- was damaged and is set aside (empty), or is gone (nil)

-- As look(), at all keys of the lock but its limit.
local function look_at_keys(lock)
  look(lock, {PLACES, TICKETS, RUNNING, REPLACED, ASIDE})
  local total = unless_hidden(pcall(redis.call, 'HGET', lock.tickets, TOTAL))
  if total and not string.find(total, '^%-?%d+$') then error('dislock: its count of bytes cannot be read', 0) end
end

-- If a key of the lock is not here or cannot be read, this is an error, before anything is done.
local function open_whole(name)
  local lock = open(name)
  line_exists(lock)
  look_at_keys(lock)
  limit_set(lock)
  return lock
end

local MEMBER_SHORT = 8  -- characters of "task":" in a message's headers

-- Whether a record is that of a task of this name, as park.lua is given it; empty: of any.  Anybody who
-- knows the id of a task may send another task under it.
local function is_of(record, task)
  local head = string.match(record, '^[^\n]*')
  local has_name = string.find(head, string.sub(task, 1, MEMBER_SHORT), 1, true)
  return task == '' or not has_name or string.find(head, task, 1, true) ~= nil
end

local function read_ticket(lock, ticket) return parse_ticket(redis.call('HGET', lock.tickets, ticket)) end

local function write_ticket(lock, ticket, parked)
  local record = string.format('%s %.0f %.0f %.0f %s %d %s ', parked.version or '1', parked.joined, parked.times,
    parked.ttl, parked.home, #parked.message, parked.between or write_terms(parked.terms)) .. parked.message
  local before = redis.call('HSTRLEN', lock.tickets, ticket)
  redis.call('HSET', lock.tickets, ticket, record)
  redis.call('HINCRBY', lock.tickets, TOTAL, #record - before)
  keep(lock.tickets)
end

local function drop_ticket(lock, ticket)
  local before = redis.call('HSTRLEN', lock.tickets, ticket)
  if redis.call('HDEL', lock.tickets, ticket) == 0 then return false end
  if redis.call('HINCRBY', lock.tickets, TOTAL, -before) <= 0 or redis.call('HLEN', lock.tickets) == 1 then
    redis.call('HDEL', lock.tickets, TOTAL)
  end
  return true
end

-- How many are in line or have their turn.
local function count_tickets(lock)
  return redis.call('HLEN', lock.tickets) - redis.call('HEXISTS', lock.tickets, TOTAL)
end

local function parse_claim(record)
  local version, joined, claimed, settles, rest = string.match(record, '^(%d+) (%d+) (%d+) (%d+) (.*)$')
  return {
    joined = tonumber(joined) or 0, claimed = tonumber(claimed) or 0, settles = tonumber(settles) or IN_BODY,
    terms = parse_terms(rest or '') or ALONE, is_later = version and version ~= '1',
  }
end

-- End the claims of processes that died, and of which no copy has come in time.  If nobody sweeps, all end.
local function tidy_claims(lock)
  local claims = redis.call('HGETALL', lock.running)
  for i = 1, #claims, 2 do
    local claim = parse_claim(claims[i + 1])
    local ends = claim.settles ~= IN_BODY and claim.settles + COPY_MS or claim.claimed + CLAIMED_MS
    if ends <= now and not claim.is_later then redis.call('HDEL', lock.running, claims[i]) end
  end
end

local function write_claim(lock, ticket, claim)
  redis.call('HSET', lock.running, ticket, string.format('1 %.0f %.0f %.0f %s',
    claim.joined, claim.claimed, claim.settles, write_terms(claim.terms)))
  live_at_least(lock.running, CLAIMED_MS)
end

-- Take a ticket out, wherever it is, and end its turn.  Returns whether it was anywhere.
local function forget(lock, ticket)
  local turn = lease_of(lock, member_of(ticket))
  if turn then drop(lock, turn) end
  redis.call('ZREM', lock.line, member_of(ticket))
  redis.call('ZREM', lock.handed, ticket)
  local claim = redis.call('HGET', lock.running, ticket)
  local was_running = claim and not parse_claim(claim).is_later
  if was_running then redis.call('HDEL', lock.running, ticket) end
  return drop_ticket(lock, ticket) or was_running
end

-- Whether the task of a ticket, or a delivery, is done.
local function is_done(lock, name) return redis.call('EXISTS', lock.name .. DONE .. name) == 1 end
local function mark_done(lock, name) redis.call('SET', lock.name .. DONE .. name, '1', 'PX', COPY_MS) end

-- Take a task out of line that must not run.  Its message is kept until its end is reported.
local function replace(lock, ticket, message)
  redis.call('HSET', lock.name .. REPLACED, ticket, message)
  keep(lock.name .. REPLACED)
  forget(lock, ticket)
  mark_done(lock, ticket)
end

-- Without a record nothing is kept.
local function set_aside(lock, ticket, what)
  forget(lock, ticket)
  if what == '' then return end
  redis.call('HSET', lock.name .. ASIDE, ticket, what)
  keep(lock.name .. ASIDE)
end

-- Some of the tasks that were replaced, and whose end is not reported yet: {ticket, message, ...}.
-- They are chosen at random, so that one whose end cannot be reported does not keep the others waiting.
local function unreported(lock)
  local key, found, bytes = lock.name .. REPLACED, {}, 0
  for _, ticket in ipairs(redis.call('HRANDFIELD', key, UNREPORTED_MOST) or {}) do
    local message = redis.call('HGET', key, ticket)
    bytes = bytes + #message
    if #found > 0 and bytes > UNREPORTED_BYTES then break end
    found[#found + 1], found[#found + 2] = ticket, message
  end
  return found
end

-- The holder of a turn, for messages.
local function as_holder(ticket, more)
  local holder = more or {}
  holder.id, holder.parked = string.match(ticket, '^(.*):%d+:%d+$'), true
  return cjson.encode(holder)
end

-- If it is delayed, the message is published now, and comes then.
local function publish(lock, ticket, message, delay_ms)
  for _, part in ipairs({lock.name, ticket, message, delay_ms or 0}) do turns[#turns + 1] = part end
end

-- Whether a parked task may have its turn: now, or soon as far as only the time is in the way.  Turns are given
-- ahead, as claims take time: all that can start in a moment, else one.
local function may_have_turn(lock, terms)
  if admits(lock, terms) then return true end
  return lock.early and (lock.early < AHEAD_US or lock.early <= SOON_US and lock.gates == 0)
end

function give_turn(lock, member, asker)
  local ticket = ticket_of(member)
  local record = redis.call('HGET', lock.tickets, ticket)
  local parked = parse_ticket(record)
  if not parked then
    set_aside(lock, ticket, record or '')
    publish(lock, ticket, record and record ~= '' and '' or false)
    return true
  end
  if member ~= asker and parked.home ~= home then return false end
  if not may_have_turn(lock, parked.terms) then return false end
  if member ~= asker and #turns >= 4 * TURNS_MOST then return false end

  local delay = math.ceil((lock.early or 0) / 1000)
  local lasts = delay + math.min(parked.ttl * 2 ^ parked.times, math.max(parked.ttl, TURN_MOST_MS))
  local gate = parked.times == 0 and rate_of(lock, parked.terms) and {gate = true}
  redis.call('ZREM', lock.line, member)
  redis.call('ZADD', lock.handed, now + lasts, ticket)
  keep(lock.handed)
  parked.times = parked.times + 1
  write_ticket(lock, ticket, parked)
  grant(lock, member, lasts, parked.terms, as_holder(ticket, gate or nil))
  if member ~= asker then publish(lock, ticket, parked.message, delay) end
  return true
end

-- As hand_off(), after tasks whose turn has run out were put back in line.
local function recall_and_hand_off(lock, asker)
  recall(lock)
  hand_off(lock, asker)
end
