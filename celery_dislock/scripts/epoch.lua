-- epoch.lua: tell a worker whether the server still has what that worker has seen, and begin a new epoch if not.
--
-- KEYS[1]   epoch     see _epoch.lua
-- ARGV      left out: only read the record
--           seen      id of the record that the worker saw last; empty: none
--           seen_ms   its swept_ms
--           was       number of parked tasks that the worker knows of
--           parked    number of parked tasks that its sweep has just counted; empty: it does not sweep
--           new       id of a new epoch: random, another one in each call
--
-- Returns   {id, swept_ms, parked, before, ago_ms, was, left, how}   as in _epoch.lua; ago_ms: since lost_ms
--           {}   there is no record
-- Touches the record alone.  Safe to send twice: a record with the id `new` was written by this call.

-- include: _epoch

local seen, seen_ms, was, parked, new = unpack(ARGV)
local it, state = read_epoch(KEYS[1])
if state == DAMAGED and new and seen ~= '' then  -- the epoch goes on, as this worker knows it
  it = {id = seen, swept = tonumber(seen_ms), parked = was, before = NONE, lost = 0, was = '0', left = '0', how = NONE}
end
if new and state ~= LATER then
  if it and it.id == seen and it.swept >= tonumber(seen_ms) then
    if parked ~= '' then it.swept, it.parked = math.max(now, it.swept + 1), parked end
  elseif seen ~= '' and not (it and (it.before == seen or it.id == new)) then
    local how = not it and 'empty' or it.id == seen and 'older' or 'other'
    local left = parked ~= '' and parked or it and it.parked or '0'
    it = {id = new, swept = now, parked = left, before = seen, lost = now, was = was, left = left, how = how}
  elseif not it and parked ~= '' then
    it = {id = new, swept = now, parked = parked, before = NONE, lost = 0, was = '0', left = '0', how = NONE}
  end
  if it then write_epoch(KEYS[1], it) end
end
if not it then return {} end
local ago = string.format('%.0f', now - it.lost)
return {it.id, string.format('%.0f', it.swept), it.parked, it.before, ago, it.was, it.left, it.how}
