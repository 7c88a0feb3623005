-- _starts.lua: when a lock with a rate was taken, and at what cost.
--   <lock>:starts   Redis TIME in microseconds at which each quantum of cost was full, newest first; after these times
--                   a record: "1 most window_ms", or "1 most window_ms quantum carry newest_us asked_us", or this and
--                   "credit since_us over over_us" once a start of it has had a cost
--     most, window_ms   the largest that any owner asked for: what the log is kept for
--     quantum     the cost that each time stands for; 1 if it is left out: then the log is exact
--     carry       cost that fills no quantum yet
--     newest_us   Redis TIME of the newest start
--     asked_us    Redis TIME of the newest start by a rate of more than QUANTA.  When none was asked for in a whole window,
--                 as after a deploy of a smaller one, the log is exact again
--     credit      cost that starts have not spent, and that is not a quantum yet; since_us: of the oldest of them
--     over        times that were cut off though they were in the window, as starts have spent more than their cost; the
--                 newest of them was over_us
-- A quantum is 1 up to a rate of QUANTA, above that a QUANTA-th of the rate.  A window that has k of the times in it has a
-- cost of k quanta, and less than one more.  So one quantum stays free, and no log is longer than QUANTA and two.

-- include: _record
-- include: _terms

local log_of, due_in, write_record, add_start, take_back

do
  local QUANTA = 1000

  -- The log of a lock, read once in a script.  One whose record cannot be read, or is not there, is kept for nothing.
  local logs = {}
  log_of = function(name)
    if logs[name] then return logs[name] end
    local record = redis.call('LINDEX', name .. STARTS, -1)
    local log = {record = record, most = 0, window = 0, quantum = 1, carry = 0, asked = now_us}
    local most, window, quantum, carry, newest, asked, costs =
      string.match(record or '', '^%d+ (%d+) (%d+) ?(%d*) ?(%d*) ?(%d*) ?(%d*)(.*)$')
    if most and #most <= NUMBER_DIGITS and #window <= NUMBER_DIGITS then log.most, log.window = tonumber(most), tonumber(window) end
    if asked and asked ~= '' and tonumber(quantum) > 0 and #quantum <= NUMBER_DIGITS and #carry <= NUMBER_DIGITS and #newest <= TOKEN_DIGITS then
      log.quantum, log.carry, log.newest, log.asked = tonumber(quantum), tonumber(carry), tonumber(newest), tonumber(asked)
      local credit, since, over, over_us
      if costs ~= '' then credit, since, over, over_us = string.match(costs, '^ (%d+) (%d+) (%d+) (%d+)') end
      if credit then log.credit, log.since, log.over, log.over_us = tonumber(credit), tonumber(since), tonumber(over), tonumber(over_us) end
    else
      log.newest = tonumber(redis.call('LINDEX', name .. STARTS, 0)) or 0
    end
    logs[name] = log
    return log
  end

  -- Microseconds until a start of this cost is within a rate, after *others*, the cost of starts that are still to come.
  -- 0: now.  A cost above the rate takes all of it.
  due_in = function(name, log, most, window, cost, others)
    local all = others + math.min(cost, most)
    local windows = math.floor((all - 1) / most)
    local fills = math.floor((log.carry + all - windows * most) / log.quantum)
    local room = log.quantum == 1 and most or math.floor((most + 1) / log.quantum) - 1
    local before = fills > room and log.newest or tonumber(redis.call('LINDEX', name .. STARTS, room - fills))
    return (before and math.max(0, before + window * 1000 - now_us) or 0) + windows * window * 1000
  end

  local function as_text(time) return time == now_us and now_as_token or string.format('%.0f', time) end

  -- Whether times that were cut off are still in the window.
  local function is_over(log) return log.over > 0 and log.over_us + log.window * 1000 > now_us end

  local function most_times(log) return log.quantum == 1 and log.most or math.ceil(log.most / log.quantum) + 1 end

  -- From now on there are costs.  What was cut off before is not known: if the log is full, as much as can be.
  local function keep_costs(starts, log)
    if log.credit then return end
    local last = log.record and tonumber(redis.call('LINDEX', starts, most_times(log) - 1))
    log.credit, log.since, log.over, log.over_us = 0, now_us, last and QUANTA or 0, last or 0
  end

  -- Write the record behind *there* times, of which no more are kept than the rate needs.
  write_record = function(starts, log, there)
    local kept = most_times(log)
    local is_long = there > kept
    if is_long and log.credit then
      local over_us = tonumber(redis.call('LINDEX', starts, kept)) or 0
      if not is_over(log) then log.over = 0 end
      log.over, log.over_us = log.over + there - kept, over_us
    end
    local record
    if log.quantum == 1 and not log.credit then record = string.format('1 %d %d', log.most, log.window)
    else
      record = string.format('1 %d %d %d %d %s %s',
        log.most, log.window, log.quantum, log.carry, as_text(log.newest), as_text(log.asked))
    end
    if log.credit then
      record = record .. string.format(' %d %s %d %s', log.credit, as_text(log.since), log.over, as_text(log.over_us))
    end
    if record == log.record and not is_long then return end
    if is_long then redis.call('LTRIM', starts, 0, kept - 1) end  -- without the old record
    if is_long or not log.record then redis.call('RPUSH', starts, record) else redis.call('LSET', starts, -1, record) end
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
    if log.credit then log.credit, log.over = 0, is_over(log) and QUANTA or 0 end
  end

  -- Count a start.
  add_start = function(name, log, most, window, terms)
    local starts, is_exact = name .. STARTS, most <= QUANTA
    if not is_exact then log.asked = now_us end
    most, window = math.max(most, log.most), math.max(window, log.window)
    if is_exact and log.quantum > 1 and log.asked + window * 1000 < now_us then most = QUANTA end
    local quantum = most > QUANTA and math.max(log.quantum, math.ceil(most / QUANTA)) or 1
    if quantum ~= log.quantum then rebase(starts, log, quantum) end
    if terms.has_cost then keep_costs(starts, log) end
    log.most, log.window, log.newest = most, window, now_us
    log.carry = log.carry + math.min(terms.cost, most)
    local filled, times = math.floor(log.carry / quantum), {now_as_token}
    for nth = 2, filled do times[nth] = now_as_token end
    log.carry = log.carry - filled * quantum
    local there = filled > 0 and redis.call('LPUSH', starts, unpack(times)) or 0
    write_record(starts, log, log.record and there - 1 or there)
    redis.call('PEXPIRE', starts, window)
  end

  -- Lower what is counted for a start at that *time*.  What is less than a quantum is kept, until it is one together with
  -- that of other starts: then the quantum is taken from before the oldest of them.  So a start counts at least until it
  -- has left the window.
  take_back = function(name, log, cost, time)
    local starts, whole = name .. STARTS, math.floor(cost / log.quantum)
    keep_costs(starts, log)
    local times = redis.call('LRANGE', starts, 0, -2)
    local function take(many, until_us)
      local left = many
      for _, at in ipairs(times) do
        if left > 0 and tonumber(at) <= until_us then left = left - redis.call('LREM', starts, left, at) end
      end
      return many - left
    end
    local taken, rest = take(whole, time), cost - whole * log.quantum
    if log.credit == 0 then log.since = time end
    log.credit, log.since = log.credit + rest, math.min(log.since, time)
    if log.credit >= log.quantum then
      taken, log.credit = taken + take(1, log.since), log.credit - log.quantum
      log.since = time
    end
    local back = is_over(log) and math.min(taken, log.over) or 0  -- cut off times take the place of those taken
    redis.call('LTRIM', starts, 0, -2)
    for _ = 1, back do redis.call('RPUSH', starts, as_text(log.over_us)) end
    log.over, log.record = log.over - back, false
    write_record(starts, log, 0)
    redis.call('PEXPIRE', starts, log.window)
  end
end

-- Count a start of a lock that is free, on terms with a rate or a cost; false if it is too early, or the clock was set
-- back.  Returns the mode of its lease.
local function start_free(name, terms)
  terms = parse_terms(terms)
  if terms.most then
    local log = log_of(name)
    if log.newest > now_us or due_in(name, log, terms.most, terms.window, terms.cost, 0) > 0 then return false end
    add_start(name, log, terms.most, terms.window, terms)
  end
  return mode_of(terms)
end
