-- _done.lua: how a parked task is marked as done.  Included after _marks.lua.
--
-- The mark of a ticket says that its work is done: a copy of its message that comes later must not run.
-- Nothing else says so: a task of which nothing is known may have been lost.  It lives for COPY_MS at
-- least.  No case was found in which no copy can come: an acknowledgement may be lost after a single turn,
-- and also one that was sent before the task ran.
--
-- A line with few marks has a string for each, and one with many has hashes:
--
--   <lock>:done:<ticket>          "1", or the delivery that has taken the task out of this line, and goes on
--                                 with it: under other locks, or without one
--   <lock>:done:@:<period>:<n>    packed ticket -> "", of those that ended in one period of COPY_MS; n = 1
--                                 is a period's first hash, and has "n" and "s", too
--
--     n    how many marks the period has
--     s    how many it left out, because the last one had many
--
-- Redis stores small hashes in one piece.  So a period's first GROUP marks are in one hash, those that
-- follow are spread over SPREAD hashes, the next over SPREAD times as many, and so on.  Each has GROUP
-- marks on average, and the server's limit is 512.  A mark is looked for in one hash on each of these
-- levels.  A period begins on the level that the last one has reached, so there are one or two.
--
-- Only tickets with an id as Celery makes them are packed, to all that is in them: a digest could be that
-- of another ticket, too, and that task would be lost.  No ticket begins with "@"; see keys/names.py.

local DONE_WITH_LOCK = '1'  -- a mark
local ANYBODY = '*'         -- stands for whichever delivery has left its name
local MANY = 4              -- marks of a period from which on hashes take less than strings
local FIRST = '0'           -- one id in 16 begins with hashes where no such number is seen
local GROUP, SPREAD = 64, 8
local COUNT, START = 'n', 's'
local NEW_WORK = '0:0'      -- most tickets end so, and packed ones leave it out
local UUID = '^(%x%x%x%x%x%x%x%x)%-(%x%x%x%x)%-(%x%x%x%x)%-(%x%x%x%x)%-(%x%x%x%x)(%x%x%x%x%x%x%x%x):(.+)$'

-- Returns a ticket as a field, and a number by which its hash is found; nil if it cannot be packed.
local function packed(ticket)
  local a, b, c, d, e, f, ending = string.match(ticket, UUID)
  if not a or string.lower(ticket) ~= ticket then return nil end
  local one, two = tonumber(a, 16), tonumber(b .. c, 16)
  local three, four = tonumber(d .. e, 16), tonumber(f, 16)
  return struct.pack('>I4I4I4I4', one, two, three, four) .. (ending == NEW_WORK and '' or ending),
    one + two + three + four  -- in ids that count or tell the time, one of them changes
end

local function number_in(first, field)
  return tonumber(redis.call('HGET', first, field) or 0)
end

-- Returns the hash on each level of a period: the last is for the mark of that number.  And how many
-- marks the levels below the last one have.
local function levels(first, start, count, number)
  local stem, names = string.sub(first, 1, -2), {}
  local hashes, below, room = 1, 0, GROUP
  while true do
    if room > start then names[#names + 1] = string.format('%s%d', stem, hashes + number % hashes) end
    if start + count <= room then return names, below end
    hashes = hashes * SPREAD
    below, room = room, room + GROUP * hashes
  end
end

-- *goes_on* is the delivery that the asker goes on with: that one's name says nothing against it.
local function is_done(lock, ticket, goes_on)
  local single, last, this, following = keys_of_mark(lock.name, ticket)
  if redis.call('EXISTS', single, last, this, following) == 0 then return false end
  local mark = redis.call('GET', single)
  if mark and (mark == DONE_WITH_LOCK or mark ~= goes_on and goes_on ~= ANYBODY) then return true end
  local field, number = packed(ticket)
  if not field then return false end
  for _, first in ipairs({last, this, following}) do
    local count = number_in(first, COUNT)
    for _, hash in ipairs(count > 0 and levels(first, number_in(first, START), count, number) or {}) do
      if redis.call('HEXISTS', hash, field) == 1 then return true end
    end
  end
  return false
end

-- As *mark*: DONE_WITH_LOCK, or the delivery that goes on with it elsewhere.
local function mark_done(lock, ticket, mark)
  local single, last, this = keys_of_mark(lock.name, ticket)

  local function is_one_of_many()
    return string.sub(ticket, 8, 8) == FIRST
      or redis.call('EXISTS', this) == 1
      or redis.call('HLEN', lock.tickets) > MANY  -- in line, beside the field TOTAL: they will have marks
      or number_in(last, COUNT) >= MANY
  end

  local field, number
  if mark == DONE_WITH_LOCK and is_one_of_many() then field, number = packed(ticket) end
  if not field then
    redis.call('SET', single, mark, 'PX', COPY_MS)
    return
  end

  local count = redis.call('HINCRBY', this, COUNT, 1)
  local lives_ms = (period + 2) * COPY_MS - now  -- until no mark of this period is younger than COPY_MS
  if count == 1 then
    local _, below = levels(last, 0, number_in(last, COUNT), 0)
    redis.call('HSET', this, START, string.format('%d', below))
    redis.call('PEXPIRE', this, lives_ms)
  end
  local start = number_in(this, START)
  local names = levels(this, start, count, number)
  local hash = names[#names]
  redis.call('HSET', hash, field, '')
  if redis.call('PTTL', hash) < 0 then redis.call('PEXPIRE', hash, lives_ms) end
end
