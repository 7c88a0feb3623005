-- begin.lua: begin a task whose message was reserved, and whose acquisition has not done so (see _begins.lua): the
-- task takes no lock or several, or was handed its lock.
--
-- KEYS[1]   <lock>:unique
-- ARGV      id, mark, number   of the message
--           ends, ttl_ms       see begin_unique() in _unique.lua
--           elsewhere          1: the name is not of the task's own locks   0: it is
--
-- Returns   the id of the task whose message has replaced this one, and which runs instead; else nil

-- include: _unique

local id, mark, number, ends, ttl, elsewhere = unpack(ARGV)
number = tonumber(number)
local it = unique_of(KEYS[1])
if is_replaced(it, mark, number) then return replaced_by(KEYS[1], it) end
begin_unique(KEYS[1], it, id, mark, number, ends, tonumber(ttl), elsewhere == '1')
