-- _newest.lua: which task came last to a lock; for lock_on_conflict="cancel".
--   <lock>:newest   "1 sent_us task"
--     sent_us   when its message was sent, by the sender's clock; not later than when it came here
--     task      its id, as owners begin with it
-- A task that was sent before it does not run any more: it is superseded.  Written when a task is granted the
-- lock, or parked.  The holders that the newest waits for are told: their leases are marked, see _terms.lua.

local newer_than, become_newest, supersede, withdraw

do
  local NEWEST_MS = 86400000  -- one day, in which an older one may come: it was delayed, or is tried again
  local RUNS_OUT = string.byte('~')  -- begins the name of an owner that is done with its lease

  -- The id of a task as a mark has it: a JSON text without escapes.
  local function as_mark(task)
    return (string.gsub(task, '[^%w%%:._-]', function(byte) return string.format('%%%02X', string.byte(byte)) end))
  end

  local function without_mark(holder) return (string.gsub(holder, '^{"superseded":"[^"]*",?', '{', 1)) end

  local function with_mark(holder, by)
    local rest = string.sub(without_mark(holder), 2)
    return string.format('{"superseded":"%s"%s', as_mark(by), rest == '}' and '' or ',') .. rest
  end

  -- Nothing if there is none, or it cannot be read.
  local function newest_of(lock)
    local sent, task = string.match(redis.call('GET', lock.name .. NEWEST) or '', '^%d+ (%d+) (.*)$')
    if sent then return tonumber(sent), task end
  end

  -- The newest task, if it was sent after this one.  Of two that were sent at one time, one is always the newer.
  newer_than = function(lock, this)
    local sent, task = newest_of(lock)
    if not sent or task == this.task then return nil end
    if this.sent < sent or this.sent == sent and this.task < task then return task end
  end

  become_newest = function(lock, this)
    redis.call('SET', lock.name .. NEWEST, string.format('1 %.0f ', this.sent) .. this.task, 'PX', NEWEST_MS)
  end

  -- Mark the leases that must end for this task: all that exclude its mode, else the oldest.  Not those of who has
  -- not begun its body.  Returns the holders, for the caller to tell.
  supersede = function(lock, terms, this)
    local set, oldest, goes, told = limit_set(lock), nil, {}, {}
    if set == 0 or has_room(count_leases(lock), terms, set) then return told end
    for owner, lease in pairs(lock.leases) do
      local runs = not is_parked(owner) and string.byte(owner, 1) ~= RUNS_OUT and not has_gate(lease)
      if runs and lease.mode ~= terms.mode then goes[#goes + 1] = lease
      elseif runs and (not oldest or lease.token - oldest.token < 0) then oldest = lease end
    end
    if not goes[1] then goes[1] = oldest end
    for _, lease in ipairs(goes) do
      lease.holder = with_mark(lease.holder, this.task)
      put(lock, lease)
      told[#told + 1] = lease.holder
    end
    return told
  end

  -- If this ticket is that of the newest, it will not run.  Who was told of it, and has not stopped, need not.
  withdraw = function(lock, ticket)
    local _, task = newest_of(lock)
    if not task or task ~= string.match(ticket, '^(.*):%d+:%d+$') then return end
    redis.call('DEL', lock.name .. NEWEST)
    for _, lease in pairs(count_leases(lock).leases) do
      if superseded_by(lease.holder) == as_mark(task) then
        write(lock.name, lease.owner, lease.expires, lease.token, lease.acquired, lease.mode, without_mark(lease.holder), lease.version)
      end
    end
  end
end
