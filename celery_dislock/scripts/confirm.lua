-- confirm.lua: keep a reservation, because its message has been sent or still waits, or its task still runs.
--
-- KEYS[1]   <lock>:unique
-- ARGV      id, mark, number   of the message
--           ttl_ms   integer > 0; an expiry that is later stays, unless the message was just sent
--           runs     1: the task runs   0: its message waits, or was just sent
--
-- Returns   1 kept   0 it is not there, or is another message's, or the task has begun unknown to the caller
--
-- Messages with lower numbers are replaced from now on, even if the key is reserved for another.  Touches that record
-- alone.

-- include: _clock
-- include: _reservation

local id, mark, number, ttl, runs = unpack(ARGV)

-- The usual case is answered before the rest is defined: the key was reserved a moment ago.
local its_id, rest, its_number, its_mark = string.match(redis.call('GET', KEYS[1]) or '',
  '^1 s %d+ (%S+) (%d+ %d+ %S+ (%d+) [01] (%S+) 0 0 0 0 %-)$')
if its_id == id and its_number == number and its_mark == mark and runs == '0' then
  redis.call('PEXPIRE', KEYS[1], ttl)  -- see write_unique()
  put_unique(KEYS[1], ttl, 'w', now + ttl, id, rest)
  return 1
end

-- include: _unique

number, ttl = tonumber(number), tonumber(ttl)
local it = unique_of(KEYS[1])
local is_news = note(it, 'confirmed', id, mark, number)
local is_kept = is_for(it, id, mark, number) and (WAITS[it.state] and '0' or it.state == 'r' and '1') == runs
if is_kept then
  local just_sent = it.state == 's'
  it.ends = just_sent and now + ttl or math.max(it.ends, now + ttl)
  if just_sent then it.state = 'w' end
end
if is_kept or is_news then
  keep_numbers(it, ttl)
  write_unique(KEYS[1], it)
end
return is_kept and 1 or 0
