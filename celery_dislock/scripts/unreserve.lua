-- unreserve.lua: end a reservation, because its message was not sent, or has ended without running.
--
-- KEYS[1]   lock
-- ARGV[1]   id     of the message's task
--
-- Touches   the reservation alone
--
-- Returns   1 ended   0 it was not there, or another's
--
-- A message that this one was about to replace is not told: it runs.

-- include: _record
-- include: _unique

local lock, id = KEYS[1], ARGV[1]

return end_unique(lock, id) and 1 or 0
