-- unreserve.lua: end a reservation, because its message was not sent, or its task has ended.
--
-- KEYS[1]   <lock>:unique
-- ARGV      id, mark, number   of the message
--           how      end: the reservation ends   stays: the key stays reserved, for a task that has ended
--           waits    1: not if the task runs   left out: in any case
--
-- Returns   1 ended   0 it was not there, or is another message's, or its task runs

-- include: _unique

local id, mark, number, how, waits = unpack(ARGV)
local it = waits and unique_of(KEYS[1])
if it and not WAITS[it.state] then return 0 end
return end_unique(KEYS[1], id, mark, tonumber(number), how == 'stays') and 1 or 0
