-- _replaced.lua: how a parked task is taken out of line that is not to run.  Included after _done.lua.
-- Its message is kept until somebody has told its end.

local function replace(lock, ticket, message)
  redis.call('HSET', lock.name .. REPLACED, ticket, message)
  keep(lock.name .. REPLACED)
  forget(lock, ticket)
  mark_done(lock, ticket, DONE_WITH_LOCK)
end
