-- sweep.lua: hand a lock on that nobody has released: its holder, or who was to publish, is dead.
--
-- KEYS[1]   lock
-- ARGV[1]   home    the caller's broker
--
-- Returns   {parked, turns, replaced}   parked: how many are in line or have their turn
--                                       turns: {lock, ticket, message, ...}, to be published
--                                       replaced: {ticket, message, ...}, whose end is to be told
--
-- Changes nothing where the lock is held and no turn has run out.  Sent twice, what the first gave
-- its turn comes again when that has run out.

-- include: _lease
-- include: _parked

home = ARGV[1]
use_parked(KEYS[1])
line_exists()  -- or an error, before anything is done
count_leases()
if anyone_waits() then
  pass_on()
  for _, key in ipairs({line, tickets, handed}) do
    if redis.call('EXISTS', key) == 1 then keep(key) end
  end
end
if redis.call('HLEN', running) > counted.x + counted.s then tidy_claims() end  -- some of them died
local replaced = redis.call('HGETALL', lock .. ':replaced')
local bytes = redis.call('HEXISTS', tickets, 'bytes')
return {redis.call('HLEN', tickets) - bytes, turns, replaced}
