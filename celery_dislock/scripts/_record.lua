-- _record.lua: how a lease is written.
--   owner -> "1 expires_ms token acquired_ms mode holder"
--     1            version of this format.  Later ones begin with the same fields, up to the mode, which may be one
--                  that is not known here: see the page Formats
--     expires_ms   Redis TIME at which the lease ends
--     token        fencing token, grows with each new lease of the lock
--     acquired_ms  Redis TIME of the acquisition
--     mode         x exclusive, s shared; without a space after it the units that it takes, if more than one, and
--                  ":spent", if its owner has said what it has spent: see spent.lua
--     holder       JSON object for messages and tools: see servers/records.py.  In later versions other fields may
--                  stand before it, without a brace

-- include: _clock
-- include: _names

local TAKE_UP_MS = 5000  -- for a waiter to take up a lease that it was handed
-- Two hours in which a copy of a message may come: twice the time after which Redis brokers deliver a message again.
-- Done-marks, claims whose result was on its way, and the numbers of reservations with "replace" are kept for it.
local COPY_MS = 7200000

-- Digits of the numbers in a record: times in ms, and tokens, which are microseconds or a little more.
-- A longer number was written by hand, and could not be written again: Lua writes 14 digits of a number.
local TIME_DIGITS, TOKEN_DIGITS = 14, 16

-- Parse the record of a lease.  Token and acquired stay text, as they are seldom compared and slow to convert.
-- A record that cannot be read was written by hand, and is an error: the lock cannot be used.
local function read(owner, record)
  local version, expires, token, acquired, mode, holder =
    string.match(record, '^(%d+) (%d+) (%d+) (%d+) (%a+[%d:]*) (.*)$')
  if not expires or #expires > TIME_DIGITS or #token > TOKEN_DIGITS or #acquired > TIME_DIGITS then
    local shown = string.gsub(string.sub(record, 1, 60), '[^%w%p ]', '?')
    error('dislock: a lease in it cannot be read: ' .. shown, 0)
  end
  return {
    owner = owner, expires = tonumber(expires), token = token, acquired = acquired, mode = mode,
    holder = holder, version = version,
  }
end

-- When a lease ends; nothing if there is none, or its record cannot be read.  Takes a third of read().
local function ends_at(record)
  return tonumber(string.match(record or '', '^%d+ (%d+) %d+ %d+ %a+[%d:]* '))
end

-- Write a lease.  The caller sees to the expiry of the hash.
local function write(name, owner, expires, token, acquired, mode, holder, version)
  redis.call('HSET', name, owner, table.concat({version or '1', expires, token, acquired, mode, holder}, ' '))
end

-- The encoded id of the newest task, if that waits for this lease to end: a mark at the start of the lease's holder.
local function superseded_by(holder) return string.match(holder, '^[^{]*{"superseded":"([^"]*)"') end
