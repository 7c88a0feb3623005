-- _parked.lua: how parked tasks are written.  Put after _lease.lua in front of the scripts that can
-- give them their turn, whose callers publish the messages that they are given.
--
-- A parked task is known by its ticket, which names one delivery of work: "<task id>:<retries>:..."
-- Beside the lock, with its name in front of theirs and so in its slot:
--
--   <lock>:line        has "<ticket>#" where it waits for its turn
--   <lock>:tickets     hash: ticket -> "1 joined_us times ttl_ms mode limit home message"
--                                      while it waits, and while its message is on its way
--                            "bytes" -> length of all these records together
--   <lock>:handed      sorted set: ticket -> Redis TIME in ms at which its turn has run out
--   <lock>:running     hash: ticket -> "1 joined_us claimed_ms settles_ms", from its claim until it is done
--   <lock>:done:<ticket>   from then on for DONE_MS: a copy that comes later is not to run.  "1", or the
--                      delivery that ran without a lock.  Nothing else says that a ticket is done: one
--                      of which nothing is known may have been lost
--   <lock>:replaced    hash: ticket -> message; another has taken its place, and its end is to be told
--   <lock>:aside       hash: ticket -> a record or message that nobody could read or run, for people
--                      to see
--
--     joined_us  when it was parked, its score in the line
--     times      how often it was given its turn
--     ttl_ms     of its lease, and of its first turn; each reserves the lock for twice as long
--     settles_ms 0 while its body runs; then until when its result and what follows are on their way:
--                a copy that comes meanwhile waits, one that comes later finds that its process died
--     home       the broker that its message came from: whoever has another cannot publish it
--     message    bytes
--
-- A turn reserves the lock by a lease of the owner "<ticket>#".  The message is given to the caller to
-- publish; who gets it claims the turn.  A turn that nobody has claimed in time is given again.

-- include: _kept

local TURNS_MOST = 100           -- that one script gives; whoever claims one goes on
local TURN_MOST_MS = 300000      -- for the last of many turns
local DONE_MS = 7200000          -- two hours: twice the time after which Redis brokers deliver again
local KEPT_ABOUT_MS = 86400000   -- a day by which lines may end sooner: not set anew each time
local CLAIMED_MS = 604800000     -- seven days in which the copy of a task whose process died may come

local tickets, handed, running  -- of the lock in use
local home = ''                 -- the caller's; empty: it cannot publish
local turns = {}                -- given here: lock, ticket, message, and so on; no message: its record
                                -- was damaged and is set aside (empty), or is gone (nil)

local function use_parked(key)
  use(key)
  tickets, handed, running = key .. ':tickets', key .. ':handed', key .. ':running'
end

local function keep(key)
  if redis.call('PTTL', key) < KEPT_MS - KEPT_ABOUT_MS then redis.call('PEXPIRE', key, KEPT_MS) end
end

-- Returns joined_us, times, ttl_ms, mode, limit, home, message; nothing where it cannot be read.
local function parse_ticket(record)
  return string.match(record, '^1 (%d+) (%d+) (%d+) ([xs]) (%d+) (%S+) (.*)$')
end

local function write_ticket(ticket, joined, times, ttl, mode, limit, its_home, message)
  local record = string.format('1 %.0f %d %.0f %s %.0f %s ', joined, times, ttl, mode, limit, its_home)
    .. message
  local before = redis.call('HSTRLEN', tickets, ticket)
  redis.call('HSET', tickets, ticket, record)
  redis.call('HINCRBY', tickets, 'bytes', #record - before)
  keep(tickets)
end

-- Returns joined_us, claimed_ms, settles_ms.
local function parse_claim(record)
  local joined, claimed, settles = string.match(record, '^1 (%d+) (%d+) (%d+)$')
  return tonumber(joined) or 0, tonumber(claimed) or 0, tonumber(settles) or 0
end

-- Claims end by themselves: one whose process died, and one whose last release never came.  A
-- copy that is to find one comes before that.  The hash lives as long as the longest of them.
local function tidy_claims()
  local last = 0
  local claims = redis.call('HGETALL', running)
  for i = 1, #claims, 2 do
    local _, claimed, settles = parse_claim(claims[i + 1])
    local ends = settles > 0 and settles + DONE_MS or claimed + CLAIMED_MS
    if ends <= now then redis.call('HDEL', running, claims[i]) end
    last = math.max(last, ends)
  end
  if last > now then redis.call('PEXPIRE', running, last - now) end
end

local function write_claim(ticket, joined, claimed, settles)
  redis.call('HSET', running, ticket, string.format('1 %.0f %.0f %.0f', joined, claimed, settles))
  tidy_claims()
end

local function drop_ticket(ticket)
  local before = redis.call('HSTRLEN', tickets, ticket)
  if redis.call('HDEL', tickets, ticket) == 0 then return false end
  if redis.call('HINCRBY', tickets, 'bytes', -before) <= 0 or redis.call('HLEN', tickets) == 1 then
    redis.call('HDEL', tickets, 'bytes')
  end
  return true
end

local function join(ticket, joined)
  redis.call('ZADD', line, string.format('%.0f', joined), ticket .. '#')
  keep(line)
end

-- Take a ticket out, wherever it is, with what is reserved for it.  Returns whether it was anywhere.
local function forget(ticket)
  redis.call('HDEL', lock, ticket .. '#')
  redis.call('ZREM', line, ticket .. '#')
  redis.call('ZREM', handed, ticket)
  local was_running = redis.call('HDEL', running, ticket) == 1
  if was_running then tidy_claims() end
  return drop_ticket(ticket) or was_running
end

local function is_done(ticket)
  return redis.call('EXISTS', lock .. ':done:' .. ticket) == 1
end

local function mark_done(ticket)
  redis.call('SET', lock .. ':done:' .. ticket, 1, 'PX', DONE_MS)
end

-- What has no record has nothing to be kept.
local function set_aside(ticket, what)
  forget(ticket)
  if what == '' then return end
  redis.call('HSET', lock .. ':aside', ticket, what)
  keep(lock .. ':aside')
end

-- Whom the lock is reserved for, for messages.
local function as_holder(ticket)
  return cjson.encode({id = string.match(ticket, '^(.*):%d+:%d+$'), parked = true})
end

local function give_ticket_its_turn(member, asker)
  local ticket = string.sub(member, 1, -2)
  local record = redis.call('HGET', tickets, ticket) or ''
  local joined, times, ttl, mode, limit, its_home, message = parse_ticket(record)
  if not joined then
    set_aside(ticket, record)
    for _, part in ipairs({lock, ticket, record ~= '' and '' or false}) do turns[#turns + 1] = part end
    return true
  end
  if member ~= asker and its_home ~= home then return false end
  if not admits(mode, tonumber(limit)) then return false end
  if member ~= asker and #turns >= 3 * TURNS_MOST then return false end

  local reserved = math.min(ttl * 2 ^ tonumber(times), math.max(ttl, TURN_MOST_MS))
  redis.call('ZREM', line, member)
  redis.call('ZADD', handed, now + reserved, ticket)
  keep(handed)
  write_ticket(ticket, joined, times + 1, ttl, mode, limit, its_home, message)
  grant(member, reserved, mode, as_holder(ticket))
  if member ~= asker then
    for _, part in ipairs({lock, ticket, message}) do turns[#turns + 1] = part end
  end
  return true
end

give_turn = give_ticket_its_turn

-- Put those whose turn has run out back to where they were in line.
local function recall_turns()
  for _, ticket in ipairs(redis.call('ZRANGEBYSCORE', handed, '-inf', now)) do
    redis.call('ZREM', handed, ticket)
    local joined = parse_ticket(redis.call('HGET', tickets, ticket) or '')
    join(ticket, joined or 0)
  end
end

local function anyone_waits()
  return redis.call('EXISTS', line, handed) > 0
end

-- As hand_on(), for those too whose turn has run out.
local function pass_on(asker)
  recall_turns()
  hand_on(asker)
end
