-- _ends.lua: release.lua, for a task that runs under a reservation, which ends with it.
--
-- KEYS, ARGV   as for that script, with all arguments; and four more at the end:
--   id, mark, number   of the message
--   how                see unreserve.lua
--
-- Returns   as that script.  Touches what that script does, and the reservation.

-- include: _unique

local function release()
-- include: the script
end

local answer = release()
local id, mark, number, how = unpack(ARGV, #ARGV - 3)
end_unique(KEYS[1] .. UNIQUE, id, mark, tonumber(number), how == 'stays')
return answer
