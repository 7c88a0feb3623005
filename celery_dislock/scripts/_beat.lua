-- _beat.lua: when the entries of beat's schedule were last sent; kept beside the lock that the leading beat holds.
--   entry -> "1 last_us token before_us"
--     1           version of this format.  Later ones begin with the same field
--     last_us     when it was last sent, by the clock of the beat that sent it
--     token       of the lease under which this was written
--     before_us   when the entry was sent before last_us; "-" once the message of last_us has gone out

-- include: _grant

local NOT_LEADING, DONE, WRONG_CLOCK, SENT_SINCE, PAUSED = 0, 1, 2, 3, 4
local runs, owner, token, beat_us = KEYS[2], ARGV[1], ARGV[2], ARGV[3]

local function leads(lock)
  local lease = lease_of(open(lock), owner)
  return lease and lease.expires > now and lease.token == token
end

local function clock_is_wrong(apart_us) return math.abs(beat_us - now_us) > tonumber(apart_us) end

local RECORD_MOST = 100  -- bytes; an entry's own record has some 50

-- Token, last_us, and before_us or "-"; nothing if there is no record, it cannot be read, or a time is in the future.
local function read_run(record)
  if not record or #record > RECORD_MOST then return end
  local version, last, rest = string.match(record, '^(%d+) (%d+) (.*)$')
  local by, before = string.match(rest or '', '^(%d+) (%S+)$')
  if version and version ~= '1' then by, before = '-', '-' end
  if not by or before ~= '-' and not string.match(before, '^%d+$') then return end
  if math.max(last, tonumber(before) or 0) - now_us > tonumber(ARGV[4]) then return end
  return by, last, before
end

local function write_run(entry, last, before)
  write_first(KEYS[1])
  redis.call('HSET', runs, entry, table.concat({'1', last, token, before}, ' '))
  redis.call('PEXPIRE', runs, KEPT_MS)
end
