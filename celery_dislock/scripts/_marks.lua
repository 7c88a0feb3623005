-- _marks.lua: the keys that say that a parked task is done.  Included after _record.lua; _done.lua reads
-- and writes them.

local period = math.floor(now / COPY_MS)

-- If none of these exists, there is no mark.  Those of the next period are there if the server's clock was
-- set back, as it may be by a failover.
local function keys_of_mark(lock, ticket)
  local begin, name = lock .. MARKS, string.format
  return lock .. DONE .. ticket, begin .. name('%d:1', period - 1), begin .. name('%d:1', period),
    begin .. name('%d:1', period + 1)
end
