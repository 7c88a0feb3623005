-- _reservation.lua: write the record of a reservation; _unique.lua says what its parts are.

-- Write the parts after the version, in their order.
local function put_unique(key, ttl_ms, ...)
  redis.call('SET', key, table.concat({'1', ...}, ' '), 'PX', ttl_ms)
end
