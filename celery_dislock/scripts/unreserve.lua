-- unreserve.lua: end a reservation, because its message was not sent, or has ended.
--
-- KEYS[1]   <lock>:unique
-- ARGV[1]   id       )
-- ARGV[2]   mark     ) of the message
-- ARGV[3]   number   )
-- ARGV[4]   how      end: it ends   stays: the key stays reserved, and the task has ended
-- ARGV[5]   waits    1: not if the task runs   left out: in any case
--
-- Touches that record alone
--
-- Returns   1 ended   0 it was not there, or another's, or its task runs

-- include: _unique

local key, id, mark, number, how = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]

local it = ARGV[5] and unique_of(key)
if it and not WAITS[it.state] then return 0 end
return end_unique(key, id, mark, number, how == 'stays') and 1 or 0
