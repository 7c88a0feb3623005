-- withdraw.lua: take a parked task out of line that cannot claim its turn, and give its turn on.
--
-- KEYS[1]   lock
-- ARGV[1]   home        the caller's broker
-- ARGV[2]   ticket
-- ARGV[3]   delivery    names the delivery that runs it without a lock: no other one is to
--                       empty: nobody runs it; it is set aside with its record
--
-- Returns   {withdrawn, turns}   withdrawn: 1 it was in line, or had its turn; or nothing is known of
--                                  it, and the delivery is to run it
--                                  0 it runs, was set aside or is done; or there is none to set aside
--                                turns: {lock, ticket, message, ...}, to be published
--
-- A ticket that was claimed is left alone.  Sent twice, the second answers 0 about a task that was set
-- aside; the delivery that runs it is answered 1 again, for two hours.

-- include: _lease
-- include: _parked

home = ARGV[1]
use_parked(KEYS[1])
line_exists()  -- or an error, before anything is done
local ticket, delivery = ARGV[2], ARGV[3]
local mark = lock .. ':done:' .. ticket
local record = ticket ~= 'bytes' and redis.call('HGET', tickets, ticket)
if not record and delivery == '' then return {0, turns} end
if not record then
  local marked = redis.call('GET', mark)
  if marked or redis.call('HEXISTS', running, ticket) == 1
    or redis.call('HEXISTS', lock .. ':aside', ticket) == 1 then
    return {marked == delivery and 1 or 0, turns}
  end
  redis.call('SET', mark, delivery, 'PX', DONE_MS)  -- it may have been lost: nothing says it is done
  return {1, turns}
end
count_leases()  -- before a reservation goes: the next token is to be higher than its
if delivery == '' then
  set_aside(ticket, record)
else
  forget(ticket)
  redis.call('SET', mark, delivery, 'PX', DONE_MS)
end
count_leases()
pass_on()
return {1, turns}
