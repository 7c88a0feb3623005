-- park_unique.lua: park.lua for a task whose message was reserved, or replaced by a newer one.
--
-- KEYS, ARGV[1] to [13]   as for park.lua
--
-- KEYS[1]    the lock, whose name is also that of the reservation
-- ARGV[14]   id       of the task
-- ARGV[15]   ends     ) see begin_unique() in _unique.lua
-- ARGV[16]   ttl_ms   )
--
-- Touches   all keys of the lock
--
-- Returns   as park.lua
--           {5, {}, id}   it was replaced by the message of that task: nothing is taken or claimed

-- include: _record
-- include: _unique
-- include: _states

local by = replaced_by(KEYS[1], ARGV[14])
if by then return {REPLACED_BY, {}, by} end

local function park()
-- include: park
end

local answer = park()
if answer[1] == GRANTED then begin_unique(KEYS[1], ARGV[14], ARGV[15], tonumber(ARGV[16])) end
return answer
