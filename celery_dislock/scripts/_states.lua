-- _states.lua: how replies begin that have more than one shape.  __init__.py has the same numbers.

local REFUSED, GRANTED, PARKED, DONE_BEFORE, FULL = 0, 1, 2, 3, 4  -- of acquire.lua and park.lua
local REPLACED_BY = 5                                              -- of acquisitions
local UNLISTED, LATER = 6, 7                                       -- of park.lua
