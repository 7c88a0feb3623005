-- reserve.lua: reserve a key for a message that is about to be sent.
--
-- KEYS[1]   <lock>:unique   the whole name, so that it is found while a slot moves; see _unique.lua
-- ARGV      id             of the message's task
--           ttl_ms         integer > 0: until it must be confirmed
--           replaces       1: the newest message counts   0: the first
--           delay_ms       with replaces: until the message is due, of two messages the sooner one counts; empty: the newest
--           nonce          of this call; the same if the command is sent again
--           result         1: the task's result is stored   0: it is not
--           known          1: the sender has chosen the id, and may ask for its result
--           mark, number   of a message that is sent again, as a retry; left out: the message is new
--
-- Returns   {0, id, state, result}       the key is reserved for the message of this task
--           {2}                          a later version has reserved the key: nothing was changed
--           {1, burst_ms, mark, number}   reserved; burst_ms: since the first message of a series in which each
--                                        replaces the one before
--
-- The older message is replaced when this one is confirmed, or its task has begun.  A message that is sent again keeps
-- its number, and never takes the key from another.  Touches that record, and <lock>:unsent:<id> if the message is
-- not to be sent and its id is known: that key has the id of the task that the lock's key is reserved for.

-- include: _clock
-- include: _reservation

local key, id, ttl, replaces, delay, nonce, result, known, mark, number = KEYS[1], unpack(ARGV)

-- The usual case is answered before the rest is defined.
if not mark and replaces == '0' and not redis.call('GET', key) then
  local since, new_mark = string.format('%.0f', now), now_as_token .. nonce
  put_unique(key, ttl, 's', now + ttl, id, since, since, nonce, '0', result, new_mark,
    '0', '0', '0', '0', '-')
  return {1, 0, new_mark, 0}
end

-- include: _unique

ttl, replaces, number = tonumber(ttl), replaces == '1', tonumber(number)
local it = unique_of(key) or new_unique(nonce)
local due = delay ~= '' and now + delay

if it.is_later then return {2} end
-- A failover can set the clock back.  With a first message of the future, messages would be put off until then.
if not due and it.first - now > 0 then it.first = now end

local function reserved() return {1, now - it.first, it.mark, tonumber(it.number)} end

-- The number of a message that is sent again.  If its mark is of another life of the record, the message replaces none:
-- it gets an odd number, as newest may be the number of a message that was never sent.
local function number_again() return mark == it.mark and number or it.newest - 0 > 0 and it.newest + 1 or 0 end

if is_reserved(it) then
  if it.nonce == nonce then return reserved() end
  if mark and is_for(it, id, mark, number) then
    it.number, it.first = number_again(), due or it.first
    if it.state == 'r' then it.state = 's' end
    it.ends = math.max(it.ends, now + ttl)
    write_unique(key, it)
    return reserved()
  end
  local SOONER_MS = 1000  -- senders' clocks differ, and so do two messages for one time
  local counts = replaces and (not due or WAITS[it.state] and due + SOONER_MS < it.first - 0)
  if mark or not counts then
    if known == '1' and not mark and it.id ~= id then
      -- A server without memory refuses this, and then nobody can tell of what the message is a duplicate.
      pcall(redis.call, 'SET', string.sub(key, 1, -#UNIQUE - 1) .. UNSENT .. id, it.id, 'PX', COPY_MS)
    end
    return {0, it.id, it.state, it.result}
  end
  -- The message that is there may wait until its reservation ends.  Until then it must find that it was replaced.
  it.kept = math.max(it.kept, it.ends + COPY_MS)
end

if due then it.first = due
elseif not (is_reserved(it) and WAITS[it.state]) then it.first = now end
if replaces and not mark then
  it.newest = it.newest + 2
  it.number = it.newest
  it.kept = math.max(it.kept, now + ttl + COPY_MS)
else
  it.number = number_again()
end
it.state, it.ends, it.since = 's', now + ttl, now
it.id, it.nonce, it.result = id, nonce, result
write_unique(key, it)
return reserved()
