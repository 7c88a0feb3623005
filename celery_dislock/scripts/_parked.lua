-- _parked.lua: how parked tasks are written.  Included after _line.lua and _marks.lua by the scripts
-- that can give them their turn, whose callers publish the messages that they are given.
--
-- A parked task is known by its ticket, which names one delivery of work: "<task id>:<retries>:..."
-- Beside the lock, with the endings of _names.lua:
--
--   <lock>:line        has "<ticket>#" while it waits for its turn
--   <lock>:tickets     ticket -> "1 joined_us times ttl_ms mode limit home message"
--                                while it waits, and while its message is on its way
--                      "bytes" -> length of all these records together
--   <lock>:handed      ticket -> Redis TIME in ms at which its turn has run out
--   <lock>:running     ticket -> "1 joined_us claimed_ms settles_ms", from its claim until it is done
--   <lock>:done:<ticket>   from then on for COPY_MS: a copy that comes later must not run; see _done.lua
--   <lock>:replaced    ticket -> message; another has taken its place, and its end is not told yet
--   <lock>:aside       ticket -> a record or message that nobody could read or run, for people to see
--
--     joined_us  when it was parked, its score in the line
--     times      how often it was given its turn
--     ttl_ms     of its lease, and of its first turn; each reserves the lock for twice as long
--     settles_ms IN_BODY while its body runs; then until when its result and what follows are on their
--                way: a copy that comes meanwhile waits, one that comes later finds that its process died
--     home       the broker that its message came from: a worker of another one cannot publish it
--     message    bytes
--
-- A turn reserves the lock by a lease of the owner "<ticket>#".  The message is given to the caller to
-- publish; the task that gets it claims the turn.  A turn that nobody has claimed in time is given again.

-- include: _recall

local TURNS_MOST = 100           -- that one script gives; whoever claims one goes on
local TURN_MOST_MS = 300000      -- for the last of many turns
local KEPT_ABOUT_MS = 86400000   -- a day by which lines may end sooner: not set anew each time
local CLAIMED_MS = 604800000     -- seven days in which the copy of a task whose process died may come

local UNTOLD_MOST, UNTOLD_BYTES = 100, 262144  -- replaced tasks in one reply

local IN_BODY = 0                -- settles_ms of a claim
local TOTAL = 'bytes'            -- the field beside the tickets

local home = ''                 -- the caller's; empty: it cannot publish
local turns = {}                -- given here: lock, ticket, message, and so on; no message: its record
                                -- was damaged and is set aside (empty), or is gone (nil)

-- Adds the keys of parked tasks to a lock that was opened, and returns it.
local function with_parked(lock)
  lock.tickets, lock.handed = lock.name .. TICKETS, lock.name .. HANDED
  lock.running = lock.name .. RUNNING
  return lock
end

-- As look(), at all keys of the lock.
local function look_at_all(lock)
  look(lock, {LINE, HANDED}, {PLACES, TICKETS, RUNNING, REPLACED, ASIDE})
  local seen, total = pcall(redis.call, 'HGET', lock.name .. TICKETS, TOTAL)
  if seen and total and not string.find(total, '^%-?%d+$') then
    error('dislock: its count of bytes cannot be read', 0)
  end
end

local function member_of(ticket)  -- of a line; and the owner of its reservation
  return ticket .. '#'
end

local function ticket_of(member)
  return string.sub(member, 1, -2)
end

local function keep(key)
  if redis.call('PTTL', key) < KEPT_MS - KEPT_ABOUT_MS then redis.call('PEXPIRE', key, KEPT_MS) end
end

-- Returns nothing where a record cannot be read, or there is none.
local function parse_ticket(record)
  local joined, times, ttl, mode, limit, its_home, message =
    string.match(record or '', '^1 (%d+) (%d+) (%d+) ([xs]) (%d+) (%S+) (.*)$')
  if not joined or #joined > 18 or #times > 15 or #ttl > TIME_DIGITS or #limit > 15 then return nil end
  return {
    joined = tonumber(joined), times = tonumber(times), ttl = tonumber(ttl), mode = mode,
    limit = tonumber(limit), home = its_home, message = message,
  }
end

local MEMBER_SHORT = 8  -- characters of "task":" in a message's headers

-- Whether a record is that of a task of this name, as park.lua is given it; empty: of any.  Who knows
-- the id of another's task may send one of his own under it.
local function is_of(record, task)
  local head = string.match(record, '^[^\n]*')
  local has_name = string.find(head, string.sub(task, 1, MEMBER_SHORT), 1, true)
  return task == '' or not has_name or string.find(head, task, 1, true) ~= nil
end

local function read_ticket(lock, ticket)
  return parse_ticket(redis.call('HGET', lock.tickets, ticket))
end

local function write_ticket(lock, ticket, parked)
  local record = string.format('1 %.0f %d %.0f %s %.0f %s ',
    parked.joined, parked.times, parked.ttl, parked.mode, parked.limit, parked.home) .. parked.message
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

-- Returns joined_us, claimed_ms, settles_ms.
local function parse_claim(record)
  local joined, claimed, settles = string.match(record, '^1 (%d+) (%d+) (%d+)$')
  return tonumber(joined) or 0, tonumber(claimed) or 0, tonumber(settles) or IN_BODY
end

local CLAIMS_FEW = 64  -- that are looked through each time; those of a longer hash, by the sweep

-- Claims end by themselves: one whose process died, and one whose last release never came.  A
-- copy that has to find one comes before that.  The hash lives as long as the longest of them.
local function tidy_claims(lock)
  local last = 0
  local claims = redis.call('HGETALL', lock.running)
  for i = 1, #claims, 2 do
    local _, claimed, settles = parse_claim(claims[i + 1])
    local ends = settles ~= IN_BODY and settles + COPY_MS or claimed + CLAIMED_MS
    if ends <= now then redis.call('HDEL', lock.running, claims[i]) end
    last = math.max(last, ends)
  end
  if last > now then redis.call('PEXPIRE', lock.running, last - now) end
end

local function claims_are_few(lock)
  return redis.call('HLEN', lock.running) <= CLAIMS_FEW
end

local function write_claim(lock, ticket, joined, claimed, settles)
  redis.call('HSET', lock.running, ticket,
    string.format('1 %.0f %.0f %.0f', joined, claimed, settles))
  if claims_are_few(lock) then tidy_claims(lock) else live_at_least(lock.running, CLAIMED_MS) end
end

local function join(lock, ticket, joined)
  redis.call('ZADD', lock.line, string.format('%.0f', joined), member_of(ticket))
  keep(lock.line)
end

-- Take a ticket out, wherever it is, with what is reserved for it.
-- Returns whether it was anywhere, and whether the lock was reserved for it.
local function forget(lock, ticket)
  local reservation = lease_of(lock, member_of(ticket))
  if reservation then drop(lock, reservation) end
  redis.call('ZREM', lock.line, member_of(ticket))
  redis.call('ZREM', lock.handed, ticket)
  local was_running = redis.call('HDEL', lock.running, ticket) == 1
  if was_running and claims_are_few(lock) then tidy_claims(lock) end
  return drop_ticket(lock, ticket) or was_running, reservation and true
end

-- What has no record has nothing to be kept.
local function set_aside(lock, ticket, what)
  forget(lock, ticket)
  if what == '' then return end
  redis.call('HSET', lock.name .. ASIDE, ticket, what)
  keep(lock.name .. ASIDE)
end

-- Some of the tasks that have lost their place, and whose end is not told yet: {ticket, message, ...}.
-- Any of them, so that one whose end cannot be told does not keep the others waiting.
local function untold(lock)
  local key, found, bytes = lock.name .. REPLACED, {}, 0
  for _, ticket in ipairs(redis.call('HRANDFIELD', key, UNTOLD_MOST)) do
    local message = redis.call('HGET', key, ticket)
    bytes = bytes + #message
    if #found > 0 and bytes > UNTOLD_BYTES then break end
    found[#found + 1], found[#found + 2] = ticket, message
  end
  return found
end

-- Whom the lock is reserved for, for messages.
local function as_holder(ticket)
  return cjson.encode({id = string.match(ticket, '^(.*):%d+:%d+$'), parked = true})
end

local function publish(lock, ticket, message)
  for _, part in ipairs({lock.name, ticket, message}) do turns[#turns + 1] = part end
end

local function give_ticket_its_turn(lock, member, asker)
  local ticket = ticket_of(member)
  local record = redis.call('HGET', lock.tickets, ticket)
  local parked = parse_ticket(record)
  if not parked then
    set_aside(lock, ticket, record or '')
    publish(lock, ticket, record and record ~= '' and '' or false)
    return true
  end
  if member ~= asker and parked.home ~= home then return false end
  if not admits(lock, parked.mode, parked.limit) then return false end
  if member ~= asker and #turns >= 3 * TURNS_MOST then return false end

  local reserved = math.min(parked.ttl * 2 ^ parked.times, math.max(parked.ttl, TURN_MOST_MS))
  redis.call('ZREM', lock.line, member)
  redis.call('ZADD', lock.handed, now + reserved, ticket)
  keep(lock.handed)
  parked.times = parked.times + 1
  write_ticket(lock, ticket, parked)
  grant(lock, member, reserved, parked.mode, as_holder(ticket))
  if member ~= asker then publish(lock, ticket, parked.message) end
  return true
end

give_turn = give_ticket_its_turn

local function anyone_waits(lock)
  return redis.call('EXISTS', lock.line, lock.handed) > 0
end

-- As hand_off(), after those whose turn has run out were put back in line.
local function recall_and_hand_off(lock, asker)
  recall(lock)
  hand_off(lock, asker)
end
