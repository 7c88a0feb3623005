-- acquire_unique.lua: acquire.lua for a task whose message was reserved, or replaced by a newer one.
--
-- KEYS, ARGV[1] to [7]   as for acquire.lua
--
-- KEYS[1]    the lock, whose name is also that of the reservation
-- ARGV[8]    id       of the task
-- ARGV[9]    ends     ) see begin_unique() in _unique.lua
-- ARGV[10]   ttl_ms   )
--
-- Touches   what acquire.lua does, the reservation, and what was replaced
--
-- Returns   as acquire.lua
--           {5, id}   it was replaced by the message of that task: nothing is taken

-- include: _record
-- include: _unique
-- include: _states

local by = replaced_by(KEYS[1], ARGV[8])
if by then return {REPLACED_BY, by} end

local function acquire()
-- include: acquire
end

local answer = acquire()
if answer[1] == GRANTED then begin_unique(KEYS[1], ARGV[8], ARGV[9], tonumber(ARGV[10])) end
return answer
