-- store.lua: tell the name of this store: of the locks of one prefix on one lock server.
--
-- KEYS[1]   store     hash: name -> the name
--                           <another name> -> taken: tasks that were parked there belong here now
--                           came -> a name that is neither, and the Redis TIME in ms of the last task
--                           that came from there
-- ARGV[1]   name      to be given if it has none   empty: only look, and change nothing
-- ARGV[2]   other     the name of a store; empty: none
-- ARGV[3]   asked     came: a task that was parked there has come here
--                     taken: those that were parked there belong here from now on
--                     renamed: *other* is the name from now on; tasks that were parked before belong here
--
-- Returns   {name, is_ours, came, ms}   is_ours: 1 a task that was parked in *other* belongs here
--                                       came: the store of the last one that does not; empty: none
--                                       ms: for how long that was so
--
-- Touches that hash alone.  Safe to send twice.

-- include: _kept

local key, wanted, other, asked = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local NAME, CAME, TAKEN = 'name', 'came', 'taken'
local TAKEN_MOST = 100  -- names: an operator takes over one, and so does who finds the data lost

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function last()
  local store, at = string.match(redis.call('HGET', key, CAME) or '', '^(%x+) (%d+)$')
  return store or '', now - (tonumber(at) or now)
end

local name = redis.call('HGET', key, NAME) or wanted
if wanted ~= '' and name == wanted then redis.call('HSET', key, NAME, name) end
local is_known = other == name or redis.call('HEXISTS', key, other) == 1

if wanted ~= '' and other ~= '' and other ~= name then
  if asked == 'taken' then
    if redis.call('HLEN', key) > TAKEN_MOST then error('dislock: too many stores were taken over', 0) end
    redis.call('HSET', key, other, TAKEN)
    if last() == other then redis.call('HDEL', key, CAME) end
    is_known = true
  elseif asked == 'renamed' then
    redis.call('HSET', key, name, TAKEN, NAME, other)
    name, is_known = other, true
  elseif not is_known then
    redis.call('HSET', key, CAME, string.format('%s %.0f', other, now))
  end
end
if wanted ~= '' then redis.call('PEXPIRE', key, KEPT_MS) end
local store, ms = last()
return {name, is_known and 1 or 0, store, ms}
