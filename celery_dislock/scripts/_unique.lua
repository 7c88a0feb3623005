-- _unique.lua: how the reservation of a key is kept, by which one message at a time waits for it.
-- Included after _record.lua.
--
--   <lock>:unique   "1 state since_ms first_ms id older"
--
--     state      s   its message is being sent: this lasts for seconds at most
--                w   its message waits
--                r   its task runs
--     since_ms   Redis TIME of the reservation
--     first_ms   of the first of the messages that have replaced each other
--     id         task id, as task_name() writes it
--     older      what this one replaces as soon as it is sent: ",id@until_ms" for each message, which may
--                wait until then
--
--   <lock>:older    hash: id of a message that was replaced -> id of the message that replaced it
--
-- A reservation never keeps a message from running; only its entry in <lock>:older does.  Each is
-- compared by id: nobody ends what another has reserved.

local OLDER_MOST = 100  -- ids in a record; a message that is left out runs as well
local OLDER_KEPT = 1000 -- ids of replaced messages; beyond that half of them are left out
local OLDER_MS = 7200000 -- two hours, where the sender does not say for how long its message may wait
local REPLACED_BY = 5   -- of acquire_unique.lua and park_unique.lua, beside the states of _states.lua

local function unique_of(lock)
  local record = redis.call('GET', lock .. UNIQUE)
  if not record then return nil end
  local state, since, first, id, older = string.match(record, '^1 (%a) (%d+) (%d+) (%S+) (%S*)$')
  if not state then return nil end
  -- A failover can set the clock back.  What has begun in the future would be postponed until then.
  local began = math.min(tonumber(first), now)
  return {state = state, since = tonumber(since), first = began, id = id, older = older}
end

local function write_unique(lock, it, ttl_ms)
  local record = string.format('1 %s %.0f %.0f %s %s', it.state, it.since, it.first, it.id, it.older)
  redis.call('SET', lock .. UNIQUE, record, 'PX', ttl_ms)
end

-- Its message is there: tell those that it replaces, for ttl_ms, and for as long as they may wait.
local function tell_older(lock, there, ttl_ms)
  if there.older == '' then return end
  local older = lock .. OLDER
  for replaced, until_ms in string.gmatch(there.older, ',([^,@]+)@(%d+)') do
    if replaced ~= there.id then  -- else its id was used before, and is the newest again
      redis.call('HSET', older, replaced, there.id)
      ttl_ms = math.max(ttl_ms, until_ms - now)
    end
  end
  live_at_least(older, ttl_ms)
  if redis.call('HLEN', older) > OLDER_KEPT then  -- messages that were purged never come, and are never told
    for nth, id in ipairs(redis.call('HKEYS', older)) do
      if nth % 2 == 0 then redis.call('HDEL', older, id) end
    end
  end
  there.older = ''
end

-- Returns whether the key was reserved for this id.
local function end_unique(lock, id)
  local there = unique_of(lock)
  if not there or there.id ~= id then return false end
  redis.call('DEL', lock .. UNIQUE)
  return true
end

-- The id of the task whose message has replaced this one; nil if none has.  Told once: what comes again
-- after that is the only copy of that work, for all that is known.
local function replaced_by(lock, id)
  local by = redis.call('HGET', lock .. OLDER, id)
  if not by then return nil end
  redis.call('HDEL', lock .. OLDER, id)
  return by
end

-- A task has begun that a message was about to replace, which is not confirmed yet: both run.
local function strike(lock, there, id)
  local kept = string.gsub(there.older, ',([^,@]+)@%d+', function(older) return older == id and '' end)
  if kept == there.older then return end
  there.older = kept
  write_unique(lock, there, redis.call('PTTL', lock .. UNIQUE))
end

-- A task begins.  With *ends* "start" its reservation is over; with "end" it is kept for ttl_ms, and
-- renewed while the task runs: also if it was lost, unless another has the key by now.  What was lost is
-- not made again under *elsewhere*, a name that is not of the task's own locks: anybody can forge one.
local function begin_unique(lock, id, ends, ttl_ms, elsewhere)
  if ends == 'expiry' then return end
  local there = unique_of(lock)
  if there and there.id ~= id then return strike(lock, there, id) end
  if there then tell_older(lock, there, OLDER_MS) end  -- its sender has not confirmed yet
  if ends == 'start' then
    if there then redis.call('DEL', lock .. UNIQUE) end
    return
  end
  if not there and elsewhere then return end
  there = there or {since = now, first = now, id = id, older = ''}
  there.state = 'r'
  write_unique(lock, there, ttl_ms)
end
