-- knows.lua: tell whether anything is known of a parked task.
--
-- KEYS[1]   lock
-- ARGV[1]   ticket
--
-- Returns   1 the task is in line, has its turn, runs, was replaced or set aside, or is done
--           0 nothing is known of it
-- Touches the lock's tickets, claims and marks; changes nothing.

-- include: _names

local lock, ticket = KEYS[1], ARGV[1]
for _, ending in ipairs({TICKETS, RUNNING, REPLACED, ASIDE}) do
  if redis.call('HEXISTS', lock .. ending, ticket) == 1 then return 1 end
end
return redis.call('EXISTS', lock .. DONE .. ticket)
