-- store.lua: tell the name of this store: of the locks of one prefix on one lock server.
--
-- KEYS[1]   store     hash: name -> the name
--                           <another name> -> taken, or drained: see below
--                           came -> a name that is neither, and the Redis TIME in ms of the last task
--                           that came from there
-- ARGV[1]   name      to be given if it has none   empty: only look, and change nothing
-- ARGV[2]   other     the name of a store; empty: none
-- ARGV[3]   asked     came: a task that was parked there has come here
--                     taken: those that were parked there belong here from now on
--                     drained: the same, and all of which nothing is known here are done
--                     renamed: this store was drained itself, and *other* is its name from now on
--
-- Returns   {name, whose, came, ms}   whose: a task's that was parked in *other*: 0 another store's
--                                     1 this one's   2 this one's, to which that one was drained
--                                     came: the store of the last one of another; empty: none
--                                     ms: for how long that was so
-- Touches that hash alone.  Safe to send twice.

-- include: _record

local key, wanted, other, asked = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local NAME, CAME, TAKEN, DRAINED = 'name', 'came', 'taken', 'drained'
local TAKEN_MOST = 100  -- names: an operator takes over one, and so does who finds the data lost
local ELSEWHERE, OURS, DRAINED_TO_HERE = 0, 1, 2

local function last()
  local store, at = string.match(redis.call('HGET', key, CAME) or '', '^(%x+) (%d+)$')
  return store or '', now - (tonumber(at) or now)
end

local function whose(name)
  if other == name then return OURS end
  local known = redis.call('HGET', key, other)
  return known == DRAINED and DRAINED_TO_HERE or known and OURS or ELSEWHERE
end

local function change(name)
  if asked == TAKEN or asked == DRAINED then
    if redis.call('HLEN', key) > TAKEN_MOST then error('dislock: too many stores were taken over', 0) end
    redis.call('HSET', key, other, asked)
    if last() == other then redis.call('HDEL', key, CAME) end
  elseif asked == 'renamed' then
    redis.call('HSET', key, name, DRAINED, NAME, other)
    return other
  elseif whose(name) == ELSEWHERE then
    redis.call('HSET', key, CAME, string.format('%s %.0f', other, now))
  end
  return name
end

local name = redis.call('HGET', key, NAME)
if wanted ~= '' then
  if not name then redis.call('HSET', key, NAME, wanted) end  -- else a full server would refuse it
  name = name or wanted
  if other ~= '' and other ~= name then name = change(name) end
  redis.call('PEXPIRE', key, KEPT_MS)
end
local store, ms = last()
return {name or '', whose(name), store, ms}
