-- _clock.lua: the server's clock, by which all scripts go.

local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
local now = math.floor(now_us / 1000)
local now_as_token = time[1] .. string.sub('00000' .. time[2], -6)  -- numbers of 16 digits are slow to format
