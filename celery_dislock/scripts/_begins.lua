-- _begins.lua: acquire.lua or park.lua, for a task whose message was reserved.
--
-- KEYS, ARGV   as for that script, whose owner is ARGV[1]; and five more arguments at the end:
--   id, mark, number   of the message
--   ends, ttl_ms       see begin_unique() in _unique.lua
--
-- Returns   as that script; or {5, {}, id}: the message of the task with this id has replaced it: nothing is taken
-- Touches what that script does, and the reservation.  Sent twice, an owner that was granted the lock the first time
-- is granted it again.

-- include: _unique
-- include: _states

local id, mark, number, ends, kept_ms = unpack(ARGV, #ARGV - 4)
number = tonumber(number)
local key = KEYS[1] .. UNIQUE

local it = unique_of(key)
-- If the slot moves, the record may be on the other node, and must not be made here: this command is an error then.
if not it then redis.call('EXISTS', key, KEYS[1] .. NEVER) end
if is_replaced(it, mark, number) and redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then
  return {REPLACED_BY, {}, replaced_by(key, it)}
end

local function grant()
-- include: the script
end

local answer = grant()
if answer[1] == GRANTED then begin_unique(key, it, id, mark, number, ends, tonumber(kept_ms)) end
return answer
