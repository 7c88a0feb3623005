-- _states.lua: how replies begin that have more than one shape.  __init__.py has the same numbers.

local REFUSED, GRANTED, PARKED, DONE_BEFORE, FULL = 0, 1, 2, 3, 4  -- of acquire.lua and park.lua
local UNLISTED, LATER = 6, 7  -- of park.lua; 5 is that of _unique.lua
local NOT_THERE, HAS_LEFT, LEFT_BEFORE = 0, 1, 2                   -- of leave.lua
