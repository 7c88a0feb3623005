-- _recall.lua: whose turn has run out.  Included after _lease.lua, also by scripts that give no turns.

-- include: _kept

-- Put parked tasks whose turn has run out back to where they were in line.  Returns whether there were any.
local function recall(lock)
  local run_out = redis.call('ZRANGEBYSCORE', lock.name .. HANDED, '-inf', now)
  for _, ticket in ipairs(run_out) do
    redis.call('ZREM', lock.name .. HANDED, ticket)
    local record = redis.call('HGET', lock.name .. TICKETS, ticket) or ''
    redis.call('ZADD', lock.line, string.match(record, '^1 (%d+) ') or 0, ticket .. '#')
  end
  if #run_out > 0 then live_at_least(lock.line, KEPT_MS) end
  return #run_out > 0
end
