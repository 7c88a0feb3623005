-- _unique.lua: how the reservation of a key is kept, and which message of the key is the newest.
--   <lock>:unique   "1 state ends id since first nonce number result mark newest confirmed begun kept by"
--     1           version of this format.  Later ones begin with the same fields, up to the id.  A record of a later
--                 version is left alone: nothing is compared, and messages go out without a reservation
--     state       s   its message is being sent: this lasts for seconds at most   w   its message waits
--                 r   its task runs   d   its task has ended, and the key stays reserved: "expiry"
--                 -   the key is free, and only the numbers are kept
--     since       Redis TIME in ms of the reservation, or of the task's end
--     first       as since, of the first message in a series in which each has replaced the one before; of a message
--                 that a sooner one may replace, when it is due
--     id, ends    task id, as reserved_name() writes it; Redis TIME in ms at which the reservation ends
--     nonce       of the call that has sent the message: a second call under the same id has another one
--     number      of the message; result   0: the task's result is not stored   1: it is
--     mark        of the life of this record: Redis TIME in microseconds at which it began, and the nonce
--                 that began it, which nobody can guess
--     newest      number of the last message that was sent to replace others.  A message that replaces others takes the
--                 next even number; one that replaces none takes the odd number after newest, or 0
--     confirmed   highest number of a message that was published; begun   of a task that has begun
--     kept        Redis TIME in ms until which mark and numbers are kept; 0: no longer than the reservation
--     by          id of the task whose number is the higher one of confirmed and begun
--
-- A message carries mark and number.  It is replaced if its mark is that of the record, and its number is
-- below confirmed or begun.  So after a task has begun no older task begins, and the newest task whose message was
-- published always may.  Reading a record deletes nothing, so each command may be sent twice.  If the record was
-- lost, the new one has another mark, and both messages run.
--
-- A reservation is compared by id, and by number if the mark is the same, so no message ends the reservation of
-- another.  The scripts for reservations touch this record alone.

-- include: _record
-- include: _reservation
-- include: _states

local WAITS = {s = true, w = true}

-- All numbers but ends stay text until they change, as Lua is slow to write numbers: compare their differences.
local function unique_of(key)
  local record = redis.call('GET', key)
  if not record then return nil end
  local state, ends, id, since, first, nonce, number, result, mark, newest, confirmed, begun, kept, by =
    string.match(record,
      '^1 ([swrd-]) (%d+) (%S+) (%d+) (%d+) (%S+) (%d+) ([01]) (%S+) (%d+) (%d+) (%d+) (%d+) (%S+)$')
  if not state then
    local is_later = string.find(record, '^%d+ %S+ %d+ %S+ ') and not string.find(record, '^1 ')
    return is_later and
      {is_later = true, state = '-', ends = 0, kept = 0, newest = -1, confirmed = 0, begun = 0} or nil
  end
  if math.max(#since, #ends, #number, #newest, #confirmed, #begun, #kept) > 15 then
    return nil  -- written by hand: Lua could not write such a number again
  end
  return {
    state = state, ends = tonumber(ends), since = since, first = first, id = id, nonce = nonce,
    number = number, result = result, mark = mark, newest = newest, confirmed = confirmed, begun = begun,
    kept = kept, by = by, is_there = true,
  }
end

local function new_unique(nonce)
  return {
    state = '-', ends = now, since = now, first = now, id = '-', nonce = '-', number = '0', result = '1',
    mark = now_as_token .. nonce, newest = '0', confirmed = '0', begun = '0', kept = '0', by = '-',
  }
end

-- Write the record, or delete it if nothing in it is needed any more.
local function write_unique(key, it)
  local ttl_ms = math.max(it.state ~= '-' and it.ends or 0, it.kept) - now
  if ttl_ms <= 0 then return redis.call('DEL', key) end
  -- A server without memory refuses SET as the first write of a script.  PEXPIRE of a record that exists is allowed.
  if it.is_there then redis.call('PEXPIRE', key, ttl_ms) end
  put_unique(key, ttl_ms, it.state, it.ends, it.id, it.since, it.first, it.nonce, it.number, it.result, it.mark,
    it.newest, it.confirmed, it.begun, it.kept, it.by)
end

local function is_reserved(it) return it and it.state ~= '-' and it.ends > now end

local function is_for(it, id, mark, number)
  return it and it.id == id and (it.mark ~= mark or it.number - number == 0)
end

-- Keep the numbers for ttl_ms, and then for as long as a copy of a message may come.
local function keep_numbers(it, ttl_ms)
  if it.kept - 0 > 0 then it.kept = math.max(it.kept, now + ttl_ms + COPY_MS) end
end

-- Note that a message was published, or that its task has begun.  Returns whether anything was noted.
-- A message with an odd number replaces none.  A number above newest was not given by this record.
local function note(it, what, id, mark, number)
  if not it or it.mark ~= mark or number - it.newest > 0 or number - it[what] <= 0 or number % 2 == 1 then
    return false
  end
  if number >= math.max(it.confirmed, it.begun) then it.by = id end
  it[what] = number
  return true
end

local function is_replaced(it, mark, number)
  return it and it.mark == mark and number < math.max(it.confirmed, it.begun)
end

-- The id of the task whose message has replaced this one.  Keeps the numbers, as this message may come again.
local function replaced_by(key, it)
  keep_numbers(it, 0)
  write_unique(key, it)
  return it.by
end

-- A task begins.  With *ends* "start" its reservation is over.  With "end" the reservation is kept for ttl_ms, and
-- renewed while the task runs; one that was lost is made again, unless the key is reserved for another by now, or
-- the record is *elsewhere*, not beside the task's own locks: anybody can forge a message that names it.
local function begin_unique(key, it, id, mark, number, ends, ttl_ms, elsewhere)
  note(it, 'begun', id, mark, number)
  if it then keep_numbers(it, 0) end
  if is_for(it, id, mark, number) then
    if ends == 'start' then it.state = '-'
    elseif ends == 'end' then it.state, it.ends = 'r', now + ttl_ms
    elseif is_reserved(it) then it.state = 'r' end
  elseif it and it.is_later then return
  elseif ends == 'end' and not is_reserved(it) and not elsewhere then
    it = it or new_unique('')
    it.state, it.ends, it.since, it.first, it.id, it.nonce = 'r', now + ttl_ms, now, now, id, '-'
    it.number = it.mark == mark and number or 0
  elseif not it or it.kept - 0 == 0 then return end
  write_unique(key, it)
end

-- End a reservation.  With *stays* the key stays reserved, for a task that has ended.
-- Returns whether it was reserved for this message.
local function end_unique(key, id, mark, number, stays)
  local it = unique_of(key)
  if not is_for(it, id, mark, number) or not is_reserved(it) then return false end
  if not stays then it.state = '-'
  elseif it.state ~= 'd' then it.state, it.since = 'd', now end
  write_unique(key, it)
  return true
end
