-- sweep.lua: hand on a lock whose holder died before its release, and give the turns again whose message the
-- process that died did not publish.
--
-- KEYS[1]   lock
-- ARGV      broker  the caller's broker
--           newer   JSON: [[lock, task, was, terms], ...]: if the first in line of that lock is still a ticket of this
--                   task, with the terms *was*, it goes by these terms, which the task's code says by now
--
-- Returns   {parked, turns, replaced, unclaimed, circles, first}
--                           parked: how many tasks wait or have their turn
--                           replaced: {ticket, message, ...}, some of the tasks whose end is not reported yet
--                           unclaimed: {ticket, ...}, of which nobody has claimed several turns in a row
--                           circles: {what open_circle() returns, ...}, for each circle that was opened
--                           first: {lock, task, terms, ...}: which tickets are first in this line, and in those where
--                           tickets wait that have passed this lock
-- Touches all keys of the lock.  If it is sent twice and the first reply is lost, the turns that the first one gave
-- are given again when they have run out.

-- include: _circles
-- include: _states
-- include: _unique

local RESERVED_MS = 60000  -- how long the key stays reserved for a parked task after a sweep; several sweeps
local UNCLAIMED = 3  -- turns in a row, after which the caller finds out whether any worker can claim the next one

-- Delete claims whose process died, if no copy of the message has come in time.  Without a sweep the hash expires.
local function tidy_claims(lock)
  local claims = redis.call('HGETALL', lock.running)
  for i = 1, #claims, 2 do
    local claim = parse_claim(claims[i + 1])
    local ends = claim.settles ~= IN_BODY and claim.settles + COPY_MS or claim.claimed + CLAIMED_MS
    if ends <= now and not claim.is_later then redis.call('HDEL', lock.running, claims[i]) end
  end
end

-- Keep the key reserved for a task in line: no worker has its message, so nobody else does.  With "expiry" the time
-- counts from the sending; see Message.to_bytes().
local function keep_reserved(lock)
  local it = count_tickets(lock) <= TURNS_MOST and unique_of(lock.name .. UNIQUE)
  if not (is_reserved(it) and it.state == 'w' and it.ends - now < RESERVED_MS) then return end
  for _, ticket in ipairs(redis.call('HKEYS', lock.tickets)) do
    if id_of(ticket) == it.id then
      local parked = read_ticket(lock, ticket)
      local ends = parked and string.match(parked.message, '^%d+ {"sent":%d+,"until":"(%a+)"')
      if ends and ends ~= 'expiry' then
        it.ends = now + RESERVED_MS
        keep_numbers(it, RESERVED_MS)
        return write_unique(lock.name .. UNIQUE, it)
      end
    end
  end
end

-- The task of the ticket that is first in a line, and its terms there, without its cost; nothing if it is none, or cannot be read.
local function first_of(at)
  local member = redis.call('ZRANGE', at.line, 0, 0)[1]
  if not (member and is_parked(member)) then return nil end
  local ticket, beside = ticket_of(member)
  local seen, its = pcall(open_whole, beside or at.name)
  local parked = seen and read_ticket(its, ticket)
  local task = parked and task_of(parked) or ''
  for nth, station in ipairs(task ~= '' and parked.stations or {}) do
    if (nth == 1 and its.name or station.name) == at.name then return task, write_rule(station.terms) end
  end
end

local function say_newer(newer)
  for _, one in ipairs(cjson.decode(newer)) do
    local name, task, was, terms = unpack(one)
    local seen, at = pcall(open_whole, name)
    local first, its
    if seen then first, its = first_of(at) end
    if first == task and its == was then
      say(at, task, parse_terms(terms))
      hand_on_later(at)
    end
  end
end

local function first_in(lines)
  local first = {}
  for _, at in ipairs(lines) do
    local task, terms = first_of(at)
    if task then for _, part in ipairs({at.name, task, terms}) do first[#first + 1] = part end end
  end
  return first
end

local function turns_unclaimed(lock)
  local unclaimed = {}
  for _, ticket in ipairs(redis.call('ZRANGE', lock.handed, 0, TURNS_MOST - 1)) do
    local parked = read_ticket(lock, ticket)
    if parked and parked.times > UNCLAIMED then unclaimed[#unclaimed + 1] = ticket end
  end
  return unclaimed
end

local newer
broker, newer = unpack(ARGV)
local lock = open_whole(KEYS[1])
say_newer(newer)
recall_and_hand_off(lock)
local lines = {lock}
for _, ticket in ipairs(keeping(lock)) do
  local parked = read_ticket(lock, ticket)
  local waits_at = parked and go_on(lock, ticket, parked)
  if waits_at then  -- a lock without tickets of its own is not listed, so not swept
    if not lines[waits_at.name] and waits_at ~= lock then lines[#lines + 1], lines[waits_at.name] = waits_at, true end
    hand_on_later(waits_at)
  end
  if not parked then end_lease(lock, lease_of(lock, member_of(ticket))) end
end
-- Tickets that stand nowhere because a key of the lock was lost: in no line, without a turn or a unit.
local known = redis.call('ZCARD', lock.line) + redis.call('ZCARD', lock.handed) + #keeping(lock)
for _, ticket in ipairs(count_tickets(lock) > known and redis.call('HRANDFIELD', lock.tickets, TURNS_MOST) or {}) do
  local member = member_of(ticket)
  local stands = redis.call('ZSCORE', lock.line, member) or redis.call('ZSCORE', lock.handed, ticket) or lease_of(lock, member)
  local parked = not stands and read_ticket(lock, ticket)
  if parked then go_on(lock, ticket, parked) end
end
hand_on_all()
supersede(lock)
local circles, kept = {}, keeping(lock)
for nth = 1, #kept do  -- from another one on each time, as all of them together look at LOOKED_AT_MOST
  local ticket = kept[(now_us + nth) % #kept + 1]
  local circle = circle_of(lock, ticket)
  if circle then circles[#circles + 1] = open_circle(circle) end
end
for _, key in ipairs({lock.line, lock.tickets, lock.handed}) do keep_key(key) end
pcall(keep_reserved, lock)  -- a record that cannot be read costs a second message, and nothing else
if redis.call('HLEN', lock.running) > redis.call('HLEN', lock.name) then tidy_claims(lock) end  -- more claims than leases

return {count_tickets(lock), turns, unreported(lock), turns_unclaimed(lock), circles, first_in(lines)}
