-- withdraw.lua: take a parked task out of line that cannot claim its turn, and give its turn on.
--
-- KEYS[1]   lock
-- ARGV      home       the caller's broker
--           ticket
--           delivery   names the delivery that goes on with it, under other locks or without one: no other
--                      copy of its turn may
--                      empty: nobody runs it; it is set aside with its record
--                      -: it has ended itself; no mark is left, as it may have sent itself again
--           task       as for leave.lua
--
-- Returns   {withdrawn, turns}   withdrawn: 1 it was in line, or had its turn; or nothing is known of
--                                  it, and the delivery goes on with it
--                                  0 it runs, was set aside or is done; or there is none to set aside
-- Touches all keys of the lock but those that were replaced.  A ticket that was claimed is left alone.
-- Sent twice, the second answers 0 about a task that was set aside or has ended; the delivery that goes on
-- with it is answered 1 again, for two hours.

-- include: _parked

local ENDED = '-'  -- a delivery
local ticket, delivery, task
home, ticket, delivery, task = unpack(ARGV)
local goes_on = delivery ~= '' and delivery ~= ENDED
local lock = open_whole(KEYS[1])

local record = ticket ~= TOTAL and redis.call('HGET', lock.tickets, ticket)
if not record then
  local mark = mark_of(lock, ticket)
  if not goes_on or mark or redis.call('HEXISTS', lock.running, ticket) == 1
    or redis.call('HEXISTS', lock.name .. ASIDE, ticket) == 1 then
    return {goes_on and mark == delivery and 1 or 0, turns}
  end
  write_first(lock.name)
  mark_done(lock, ticket, delivery)  -- it may have been lost: nothing says that it is done
  return {1, turns}
end
if not is_of(record, task) then return {0, turns} end
if delivery == '' then set_aside(lock, ticket, record) else forget(lock, ticket) end
if goes_on then mark_done(lock, ticket, delivery) end
recall_and_hand_off(lock)
return {1, turns}
