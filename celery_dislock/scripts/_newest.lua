-- _newest.lua: which task came last to a lock; for lock_on_conflict="cancel".
--   <lock>:newest   "waits", "began" -> "1 sent_us terms task"
--     waits     the newest task that was parked, until it runs or leaves its line
--     began     the newest task that was granted the lock
--     sent_us   when that task's message was sent, by the sender's clock; at most the time when it came to this server
--     terms     of the lease that the task waits for, or has
--     task      the task's id, encoded as in marks; later versions may have more behind it
-- A task that was sent before one of these two is superseded: it does not run any more.  The leases that the newest
-- task waits for are marked, so that their next renewal tells their holders; see renew.lua.

local newer_than, become_newest, supersede, withdraw

do
  local NEWEST_MS = 86400000  -- one day, in which an older task may come: it was delayed, or is tried again
  local RUNS_OUT = string.byte('~')  -- first byte of an owner that is done with its lease; see _lease.lua

  -- The id of a task, encoded so that JSON text needs no escapes for it.  One that is encoded stays as it is.
  local function as_mark(task)
    return (string.gsub(task, '[^%w%%:._-]', function(byte) return string.format('%%%02X', string.byte(byte)) end))
  end

  local function without_mark(holder) return (string.gsub(holder, '^([^{]*{)"superseded":"[^"]*",?', '%1', 1)) end

  local function with_mark(holder, by)
    local before, rest = string.match(without_mark(holder), '^([^{]*{)(.*)$')
    if not before then return holder end
    return string.format('%s"superseded":"%s"%s', before, as_mark(by), rest == '}' and '' or ',') .. rest
  end

  local function newest(lock, which)
    local record = redis.call('HGET', lock.name .. NEWEST, which)
    local sent, terms, task = string.match(record or '', '^%d+ (%d+) (%S+) (%S+)')
    return sent and {sent = tonumber(sent), terms = terms, task = task}
  end

  -- Of two tasks that were sent at the same microsecond, the id decides.
  local function is_newer(one, other)
    local mine, its = as_mark(one.task), as_mark(other.task)
    if mine == its then return false end
    return one.sent > other.sent or one.sent == other.sent and mine > its
  end

  -- The id of a task that was sent after this one, if there is one.
  newer_than = function(lock, canceller)
    for _, which in ipairs({'waits', 'began'}) do
      local one = newest(lock, which)
      if one and is_newer(one, canceller) then return one.task end
    end
  end

  become_newest = function(lock, canceller, which)
    local waits, other = newest(lock, 'waits'), newest(lock, which)
    if which == 'began' and waits and not is_newer(waits, canceller) then redis.call('HDEL', lock.name .. NEWEST, 'waits') end
    if other and is_newer(other, canceller) then return end
    redis.call('HSET', lock.name .. NEWEST, which, string.format('1 %.0f %s ', canceller.sent, canceller.terms) .. as_mark(canceller.task))
    redis.call('PEXPIRE', lock.name .. NEWEST, NEWEST_MS)
  end

  -- Mark the leases that must end for this task: all of the other mode; if there are none, the oldest.  Leases of
  -- tickets and of owners whose body has not begun are left alone.  Returns the holders, for the caller to tell.
  -- Without *canceller*: for the newest task that waits.  It may have come while the lock was paused, or before others
  -- were handed the lock.
  supersede = function(lock, canceller)
    canceller = canceller or newest(lock, 'waits')
    if not canceller then return {} end
    local terms, set, oldest, goes, told = parse_terms(canceller.terms), limit_set(lock), nil, {}, {}
    if not terms or is_paused(lock) or has_room(count_leases(lock), terms, set) then return told end
    for owner, lease in pairs(lock.leases) do
      local runs = not is_parked(owner) and string.byte(owner, 1) ~= RUNS_OUT and not has_gate(lease)
      if runs and units_of(lease) ~= terms.mode then goes[#goes + 1] = lease
      elseif runs and (not oldest or lease.token - oldest.token < 0) then oldest = lease end
    end
    if not goes[1] then goes[1] = oldest end
    write_first(lock.name)  -- the sweep may write nothing else
    for _, lease in ipairs(goes) do
      lease.holder = with_mark(lease.holder, canceller.task)
      put(lock, lease)
      told[#told + 1] = lease.holder
    end
    return told
  end

  -- A ticket leaves the line without a run.  If it is that of the newest task, the marks of that task are removed:
  -- holders that have not stopped for it need not stop.
  withdraw = function(lock, ticket)
    local one = newest(lock, 'waits')
    if not one or one.task ~= as_mark(id_of(ticket) or '') then return end
    redis.call('HDEL', lock.name .. NEWEST, 'waits')
    for _, lease in pairs(count_leases(lock).leases) do
      if superseded_by(lease.holder) == one.task then
        write(lock.name, lease.owner, lease.expires, lease.token, lease.acquired, lease.mode, without_mark(lease.holder), lease.version)
      end
    end
  end
end
