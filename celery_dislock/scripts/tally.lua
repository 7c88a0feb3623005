-- tally.lua: count the parked tasks in a part of a line, by the names of their tasks.
--
-- KEYS[1]   lock
-- ARGV[1]   first   rank in line of the first place, from 0
-- ARGV[2]   most    places to count
--
-- Returns   {now_us, places, joined_us, task, number, ...}
--
--   now_us      Redis TIME in microseconds
--   places      that were looked at: fewer than most at the end of the line
--   joined_us   when the first parked task among them was parked; empty: there is none
--   task        name as the message's header has it: text of JSON, without its quotes
--
-- Touches the lock's line and tickets; changes nothing.

-- include: _names

local line, tickets = KEYS[1] .. LINE, KEYS[1] .. TICKETS
local first, most = tonumber(ARGV[1]), tonumber(ARGV[2])

local time = redis.call('TIME')
local places = redis.call('ZRANGE', line, first, first + most - 1, 'WITHSCORES')
local joined, names, counted = '', {}, {}
for i = 1, #places, 2 do
  if string.sub(places[i], -1) == '#' then
    if joined == '' then joined = places[i + 1] end
    local record = redis.call('HGET', tickets, string.sub(places[i], 1, -2)) or ''
    local task = string.match(string.match(record, '^[^\n]*'), '"task": ?"(.-)"') or ''
    if not counted[task] then
      counted[task] = 0
      names[#names + 1] = task
    end
    counted[task] = counted[task] + 1
  end
end
local told = { time[1] .. string.sub('00000' .. time[2], -6), #places / 2, joined }
for _, task in ipairs(names) do
  told[#told + 1] = task
  told[#told + 1] = counted[task]
end
return told
