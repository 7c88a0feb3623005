-- begin.lua: a task begins whose message was reserved, and which does not ask for its lock by a script
-- that says so: it takes none, takes several, or was handed its lock by another.
--
-- KEYS[1]   <lock>:unique
-- ARGV[1]   id          )
-- ARGV[2]   mark        ) of the message
-- ARGV[3]   number      )
-- ARGV[4]   ends        ) see begin_unique() in _unique.lua
-- ARGV[5]   ttl_ms      )
-- ARGV[6]   elsewhere   1: the name is not of the task's own locks   0: it is
--
-- Touches that record alone
--
-- Returns   the id of the task by whose message it was replaced, and which runs instead; else nil

-- include: _unique

local key, id, mark, number = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])

local it = unique_of(key)
if is_replaced(it, mark, number) then return replaced_by(key, it) end
begin_unique(key, it, id, mark, number, ARGV[4], tonumber(ARGV[5]), ARGV[6] == '1')
return nil
