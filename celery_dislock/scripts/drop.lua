-- drop.lua: take a parked task out of line at a person's command, or take its turn away.
--
-- KEYS[1]   lock
-- ARGV      broker   the caller's broker
--           ticket
--           note     why: a member of a JSON object, which is put into the first line of the message
--
-- Returns   {0, turns}                  the task is not in line: it runs, or is done, or was dropped before
--           {1, turns, message, ours}   dropped; ours: 1 the message is of the caller's broker, and the caller
--                                       reports the task's end   0 a worker of the message's broker does so
--           {2, turns}                  the record cannot be read: it is set aside
-- Touches all keys of the lock.  No copy of its message runs.  Sent twice, the second answers 0.

-- include: _parked

local ticket, note
broker, ticket, note = unpack(ARGV)
local lock = open_whole(KEYS[1])

local function with_note(message)
  local _, ends = string.find(message, '^%d+ {')
  return ends and string.sub(message, 1, ends) .. note .. ',' .. string.sub(message, ends + 1) or message
end

local record = ticket ~= TOTAL and redis.call('HGET', lock.tickets, ticket)
if not record then return {0, turns} end
local parked = parse_ticket(record)
if not parked then
  set_aside(lock, ticket, record, true)
  recall_and_hand_off(lock)
  return {2, turns}
end
local message = with_note(parked.message)
write_first(lock.name)
replace(lock, ticket, message)
withdraw(lock, ticket)
recall_and_hand_off(lock)
return {1, turns, message, parked.broker == broker and 1 or 0}
