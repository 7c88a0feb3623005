-- tick.lua: claim a tick of an entry before its message is sent; or note that the message has gone out.
--
-- KEYS[1]   lock
-- KEYS[2]   <lock>:beat
-- ARGV[1]   owner
-- ARGV[2]   token
-- ARGV[3]   beat_us     when the tick is sent, by the beat's clock
-- ARGV[4]   apart_us    most difference of the clocks with which a beat may send
-- ARGV[5]   entry
-- ARGV[6]   before_us   when the entry was last sent, as this beat knows it; "-": the message has gone out
--
-- Returns   {0}            not leading: nothing was changed
--           {1}            claimed, or noted
--           {2, now_us}    the beat's clock is wrong; this is the server's
--           {3, last_us}   another beat has claimed this tick, or a later one, at that time
--           {4}            an operator has paused the lock: nothing was changed
-- Touches the record of that entry, and reads the lock; see _beat.lua.
-- Safe to send twice: the lease that has written a record may write it again.

-- include: _beat

local entry, before = ARGV[5], ARGV[6]
if not leads(KEYS[1]) then return {NOT_LEADING} end
if before ~= '-' then
  if is_paused(open(KEYS[1])) then return {PAUSED} end
  if clock_is_wrong(ARGV[4]) then return {WRONG_CLOCK, string.format('%.0f', now_us)} end
  local by, last = read_run(redis.call('HGET', runs, entry))
  if by and by ~= token and tonumber(last) > tonumber(before) then return {SENT_SINCE, last} end
else  -- the note may be late, and two may lead: another beat may have claimed a later tick since
  local by, last = read_run(redis.call('HGET', runs, entry))
  if by and by ~= token and tonumber(last) > tonumber(beat_us) then return {DONE} end
end
write_run(entry, beat_us, before)
return {DONE}
