-- _kept.lua: how long lines of parked tasks, and the list of them, are kept that nobody looks at.

local KEPT_MS = 2592000000  -- thirty days without a worker
