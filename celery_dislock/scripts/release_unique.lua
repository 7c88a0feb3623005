-- release_unique.lua: release.lua for a task that runs under a reservation, which ends with it.
--
-- KEYS, ARGV[1] to [5]   as for release.lua; all are given
--
-- KEYS[1]   the lock, whose name is also that of the reservation
-- ARGV[6]   id   of the task
--
-- Touches   what release.lua does, and the reservation
--
-- Returns   as release.lua

-- include: _record
-- include: _unique

end_unique(KEYS[1], ARGV[6])

local function release()
-- include: release
end

return release()
