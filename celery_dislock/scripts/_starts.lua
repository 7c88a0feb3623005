-- _starts.lua: when a lock with a rate was taken, and at what cost.
--   <lock>:starts   Redis TIME in microseconds at which each quantum of cost was full, newest first; after these times
--                   a record: "1 most window_ms", or "1 most window_ms quantum carry newest_us asked_us"
--     most, window_ms   the largest that any owner asked for: what the log is kept for
--     quantum     the cost that each time stands for; 1 if it is left out: then the log is exact
--     carry       cost that fills no quantum yet
--     newest_us   Redis TIME of the newest start
--     asked_us    Redis TIME of the newest start by a rate of more than QUANTA.  When none was asked for in a whole window,
--                 as after a deploy of a smaller one, the log is exact again
-- A quantum is 1 up to a rate of QUANTA, above that a QUANTA-th of the rate.  A window that has k of the times in it has a
-- cost of k quanta, and less than one more.  So one quantum stays free, and no log is longer than QUANTA and two.

-- include: _record
-- include: _terms

local QUANTA = 1000

-- The log of a lock, read once in a script.  One whose record cannot be read, or is not there, is kept for nothing.
local logs = {}
local function log_of(name)
  if logs[name] then return logs[name] end
  local record = redis.call('LINDEX', name .. STARTS, -1)
  local log = {record = record, most = 0, window = 0, quantum = 1, carry = 0, asked = now_us}
  local most, window, rest = string.match(record or '', '^%d+ (%d+) (%d+)(.*)$')
  if most and #most <= NUMBER_DIGITS and #window <= NUMBER_DIGITS then log.most, log.window = tonumber(most), tonumber(window) end
  local quantum, carry, newest, asked
  if rest and rest ~= '' then quantum, carry, newest, asked = string.match(rest, '^ (%d+) (%d+) (%d+) (%d+)') end
  if quantum and tonumber(quantum) > 0 and #quantum <= NUMBER_DIGITS and #carry <= NUMBER_DIGITS and #newest <= TOKEN_DIGITS then
    log.quantum, log.carry, log.newest, log.asked = tonumber(quantum), tonumber(carry), tonumber(newest), tonumber(asked)
  else
    log.newest = tonumber(redis.call('LINDEX', name .. STARTS, 0)) or 0
  end
  logs[name] = log
  return log
end

-- Microseconds until a start of this cost is within a rate, after *others*, the cost of starts that are still to come.
-- 0: now.  A cost above the rate takes all of it.
local function due_in(name, log, most, window, cost, others)
  local all = others + math.min(cost, most)
  local windows = math.floor((all - 1) / most)
  local fills = math.floor((log.carry + all - windows * most) / log.quantum)
  local room = log.quantum == 1 and most or math.floor((most + 1) / log.quantum) - 1
  local before = fills > room and log.newest or tonumber(redis.call('LINDEX', name .. STARTS, room - fills))
  return (before and math.max(0, before + window * 1000 - now_us) or 0) + windows * window * 1000
end

local function as_text(time) return time == now_us and now_as_token or string.format('%.0f', time) end

-- Write the record behind *there* times, of which no more are kept than the rate needs.
local function write_record(starts, log, there)
  local record = string.format('1 %.0f %.0f', log.most, log.window)
  if log.quantum > 1 then
    record = record .. string.format(' %d %d %s %s', log.quantum, log.carry, as_text(log.newest), as_text(log.asked))
  end
  local kept = log.quantum == 1 and log.most or math.ceil(log.most / log.quantum) + 1
  local is_long = there > kept
  if record == log.record and not is_long then return end
  if log.record or is_long then redis.call('LTRIM', starts, 0, is_long and kept - 1 or -2) end  -- without the old record
  redis.call('RPUSH', starts, record)
  log.record = record
end

-- Write a log anew in another quantum.  Each time is that at which the new quantum was full by the old times, so no start
-- counts as older than it is.
local function rebase(starts, log, quantum)
  local times, filled, sum = redis.call('LRANGE', starts, 0, math.ceil(QUANTA * quantum / log.quantum)), {}, 0
  local function fill(cost, time)
    sum = sum + cost
    while sum >= quantum do filled[#filled + 1], sum = time, sum - quantum end
  end
  for nth = #times, 1, -1 do
    if tonumber(times[nth]) then fill(log.quantum, times[nth]) end
  end
  fill(log.carry, as_text(log.newest))
  redis.call('DEL', starts)
  for nth = math.max(1, #filled - QUANTA), #filled do redis.call('LPUSH', starts, filled[nth]) end
  log.quantum, log.carry, log.record = quantum, sum, false
end

-- Count a start.
local function add_start(name, log, most, window, cost)
  local starts, is_exact = name .. STARTS, most <= QUANTA
  if not is_exact then log.asked = now_us end
  most, window = math.max(most, log.most), math.max(window, log.window)
  if is_exact and log.quantum > 1 and log.asked + window * 1000 < now_us then most = QUANTA end
  local quantum = most > QUANTA and math.max(log.quantum, math.ceil(most / QUANTA)) or 1
  if quantum ~= log.quantum then rebase(starts, log, quantum) end
  log.most, log.window, log.newest = most, window, now_us
  log.carry = log.carry + math.min(cost, most)
  local filled, times = math.floor(log.carry / quantum), {now_as_token}
  for nth = 2, filled do times[nth] = now_as_token end
  log.carry = log.carry - filled * quantum
  local there = filled > 0 and redis.call('LPUSH', starts, unpack(times)) or 0
  write_record(starts, log, log.record and there - 1 or there)
  redis.call('PEXPIRE', starts, window)
end

-- Count a start of a lock that is free, on terms with a rate; false if it is too early, or the clock was set back.
local function start_free(name, terms)
  terms = parse_terms(terms)
  local log = log_of(name)
  if log.newest > now_us or due_in(name, log, terms.most, terms.window, 1, 0) > 0 then return false end
  add_start(name, log, terms.most, terms.window, 1)
  return true
end
