-- ticks.lua: begin to lead: read when each entry was last sent, and note it where that is not known.
--
-- KEYS[1]   lock
-- KEYS[2]   <lock>:beat
-- ARGV[1]   owner
-- ARGV[2]   token
-- ARGV[3]   beat_us     now, by the beat's clock
-- ARGV[4]   apart_us    most difference of the clocks with which a beat may send
-- ARGV[5]   followed    1: another beat may have sent meanwhile, of which this one knows nothing   0: none
-- ARGV[6]   entry, last_us, ...   the schedule as this beat knows it
--
-- Returns   {0}           not leading: nothing was changed
--           {1, entry, last_us, before_us, ...}   all that was known; before_us as in the record
--           {2, now_us}   the beat's clock is wrong; this is the server's
-- Touches the records, and reads the lock; see _beat.lua.  Deletes entries that are not in the schedule and were
-- not sent for thirty days.  Writes the caller's token into all other records: this beat knows of them, and may send
-- an entry again if the schedule says so, as after an edit.  If there is no record, the server has lost those of
-- earlier beats: for a beat that followed another one, all entries begin anew.
-- Safe to send twice: the second call returns what the first has noted, which is what this beat knows.

-- include: _beat

if not leads(KEYS[1]) then return {NOT_LEADING} end
if clock_is_wrong(ARGV[4]) then return {WRONG_CLOCK, string.format('%.0f', now_us)} end

local mine = {}
for i = 6, #ARGV, 2 do mine[ARGV[i]] = ARGV[i + 1] end

local told, known = {DONE}, redis.call('HGETALL', runs)
for i = 1, #known, 2 do
  local entry = known[i]
  local by, last, before = read_run(known[i + 1])
  if not mine[entry] and now_us - (last or 0) > KEPT_MS * 1000 then
    redis.call('HDEL', runs, entry)
  elseif by then
    mine[entry] = nil
    for _, part in ipairs({entry, last, before}) do told[#told + 1] = part end
    write_run(entry, last, before)
  end
end
local anew = #known == 0 and ARGV[5] == '1'
for entry, last in pairs(mine) do
  last = anew and beat_us or last
  if anew then for _, part in ipairs({entry, last, '-'}) do told[#told + 1] = part end end
  write_run(entry, last, '-')
end
if #known > 0 then redis.call('PEXPIRE', runs, KEPT_MS) end
return told
