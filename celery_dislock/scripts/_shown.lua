-- _shown.lua: what people are shown of waiters and parked tasks, without the parts that are too long.

-- include: _override

local HEAD_MOST = 65536  -- bytes of a record that come before its message: hundreds of locks
local HEADER_MOST = 16384  -- bytes of a message's head; a head that is cut off is shown as one that cannot be read

-- What is parked under a ticket beside a lock, in two lines: the second has the head of its message.
local function show_ticket(name, ticket)
  local record = redis.call('HGET', name .. TICKETS, ticket) or ''
  local length = string.match(record, '^%d+ %d+ %d+ %d+ %S+ (%d+) ')
  local starts = #record - (length or 0)
  local message = string.sub(record, starts + 1, starts + HEADER_MOST)
  return string.sub(record, 1, math.min(starts, HEAD_MOST)) .. '\n' .. string.match(message, '^[^\n]*')
end

-- What a member of a lock's line waits for; of a ticket beside another lock that cannot be read, nothing.
local function show_waiter(lock, member)
  if not is_parked(member) then return redis.call('HGET', lock.places, member) or '' end
  local ticket, beside = ticket_of(member)
  if not beside then return show_ticket(lock.name, ticket) end
  local seen, record = pcall(show_ticket, beside, ticket)
  return seen and record or '\n'
end

-- All that is set for a lock: {name, value, since_ms, until_ms, note, ...}
local function show_overrides(lock)
  local shown = {}
  for _, set in pairs(overrides(lock)) do
    for _, part in ipairs({set.name, set.value, set.since, set.until_ms, set.note}) do shown[#shown + 1] = part end
  end
  return shown
end
