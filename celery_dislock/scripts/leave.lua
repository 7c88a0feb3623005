-- leave.lua: take a parked task out of line for good, and hand its turn on.
--
-- KEYS[1]   lock
-- ARGV      broker   the caller's broker
--           ticket
--           how      over: the task has ended, and no copy of it must run, even if it has claimed its turn
--                    ended: the task has ended, and has not claimed its turn; it may have sent itself again, so
--                           copies run
--                    runs: the task runs without a lock, and no other copy of it must
--                    aside: nobody can run the task; its record is kept for people to see
--                    unread: as aside, also for a task that was replaced, and whose end cannot be reported
--           task     as for park.lua: another task with the same id stays in line
--           delivery   its name, which no other has; only with runs
--
-- Returns   {left, turns}   left: 1 the task was there: it waited, had its turn, or was replaced; or "runs", and
--                                   nothing is known of it
--                                 2 it has claimed its turn, was set aside or is done; or it was replaced, with
--                                   "runs" or "aside": nothing was changed.  With "runs" a claim that was left, as
--                                   nobody has its lease, does not count
--                                 0 it was not there
-- Touches all keys of the lock.  Sent twice, the second answers 0 or 2; with runs, the same.

-- include: _parked

local NOT_THERE, HAS_LEFT, LEFT_BEFORE = 0, 1, 2  -- __init__.py has the same numbers

local ticket, how, task, delivery
broker, ticket, how, task, delivery = unpack(ARGV)
local lock = open_whole(KEYS[1])
if delivery and is_done(lock, delivery) then
  recall_and_hand_off(lock)
  return {HAS_LEFT, turns}
end

-- Whether a claim was left: its reply was lost, or its process has died.  park.lua lets a copy run then, too.
local function is_left()
  local claim = parse_claim(redis.call('HGET', lock.running, ticket))
  return not claim.is_later and claim.settles <= now and not leases_of(lock, id_of(ticket) .. '@')[1]
end

local has_place = ticket ~= TOTAL and redis.call('HGET', lock.tickets, ticket)
local record = has_place or redis.call('HGET', lock.name .. REPLACED, ticket)
local has_claimed = redis.call('HEXISTS', lock.running, ticket) == 1 and not (how == 'runs' and is_left())

if record and not is_of(record, task) then return {NOT_THERE, turns} end
if has_claimed and how ~= 'over' then return {LEFT_BEFORE, turns} end
if record and not has_place and (how == 'runs' or how == 'aside') then return {LEFT_BEFORE, turns} end
if not (record or has_claimed) then
  local is_known = is_done(lock, ticket) or redis.call('HEXISTS', lock.name .. ASIDE, ticket) == 1
  if how == 'over' then recall_and_hand_off(lock) end  -- its record may be lost, and the lock free for the next
  if is_known or how ~= 'runs' then return {is_known and LEFT_BEFORE or NOT_THERE, turns} end
  write_first(lock.name)
end

forget(lock, ticket)
if how ~= 'runs' and not has_claimed then withdraw(lock, ticket) end
redis.call('HDEL', lock.name .. REPLACED, ticket)
if how == 'aside' or how == 'unread' then set_aside(lock, ticket, record)
elseif how ~= 'ended' then mark_done(lock, ticket) end
if delivery then mark_done(lock, delivery) end
recall_and_hand_off(lock)
return {HAS_LEFT, turns}
