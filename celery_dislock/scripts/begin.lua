-- begin.lua: a task begins whose message was reserved, and which does not ask for its lock by a script
-- that says so: it takes none, takes several, or was handed its lock by another.
--
-- KEYS[1]   lock
-- ARGV[1]   id
-- ARGV[2]   ends     ) see begin_unique() in _unique.lua
-- ARGV[3]   ttl_ms   )
-- ARGV[4]   elsewhere   1: the name is not of the task's own locks   0: it is
--
-- Touches   the reservation, and what was replaced
--
-- Returns   the id of the task by whose message it was replaced, and which runs instead; else nil

-- include: _record
-- include: _unique

local by = replaced_by(KEYS[1], ARGV[1])
if by then return by end
begin_unique(KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4] == '1')
return nil
