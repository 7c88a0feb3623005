-- _circles.lua: find tickets that wait for each other, and open their circle.
--
-- Tasks that pass the same locks in different orders can wait for each other for ever: tasks of two versions of
-- the code, two different tasks, or a task and a waiter in a slot.  A ticket can go on if one of the owners that it
-- waits for can: one that runs or has its turn, or is first in a line where only a rate or an operator is in the
-- way.  A ticket is stuck if there is no such owner among those it waits for, those that they wait for, and so on.
-- The way from a stuck ticket to the youngest owner that it waits for, and on from there, always comes to a circle.
-- The youngest ticket in that circle gives back all that it keeps, and arrives anew.  The youngest of all that are
-- stuck would be wrong: it may stand behind the circle, and would give back and come again for ever.

-- include: _parked

local LOOKED_AT_MOST = 1000  -- tickets and waiters in one script; if there are more, one is assumed to go on

local looked_at = 0
local waiting_now = {}  -- what waiting_ticket() returns, by lock and member, until a circle is opened

-- The ticket of a member of a lock, and where that ticket waits; nothing if it has its turn, or can go on now.
local function look_at(at, member)
  local ticket, beside = ticket_of(member)
  local seen, its = pcall(open_whole, beside or at.name)
  local parked = seen and not redis.call('ZSCORE', its.handed, ticket) and read_ticket(its, ticket)
  local nth = parked and next_station(its, ticket, parked)
  if not nth then return nil end
  local where, there = station_of(its, ticket, parked.stations, nth)
  return where and {
    name = member_elsewhere(its.name, ticket), at = where, member = there, terms = parked.stations[nth].terms,
    joined = parked.joined, lock = its, ticket = ticket, parked = parked, nth = nth,
  }
end

local function waiting_ticket(at, member)
  local name = at.name .. '\0' .. member
  if waiting_now[name] == nil then waiting_now[name] = look_at(at, member) or false end
  return waiting_now[name] or nil
end

-- The owners that a ticket, or a waiter in a slot, waits for; nothing if it can go on without them.
local function waits_for(one)
  local head = redis.call('ZRANGE', one.at.line, 0, 0)[1]
  one.is_behind = head and head ~= one.member
  if one.is_behind then return {head} end
  local terms, is_full = one.terms, not one.terms or not has_room(count_leases(one.at), one.terms, limit_set(one.at))
  if limit_set(one.at) == 0 or not is_full and (admits(one.at, terms) or starts_in(one.at, terms, 0) > 0) then return nil end
  local owners = {}
  for owner, lease in pairs(count_leases(one.at).leases) do
    if is_full or has_gate(lease) then owners[#owners + 1] = owner end  -- if it is not full, gates are in the way
  end
  return owners
end

-- A ticket, the owners that it waits for, those that they wait for, and so on, by name; nothing if one can go on.
local function stuck_with(start)
  local found, lines, in_slots, nth = {}, {}, {}, 1
  local function add(one)
    if found[one.name] then return end
    found[#found + 1], found[one.name] = one, one
    lines[one.at.name] = one.at
    for before = 1, one.ticket and one.nth - 1 or 0 do
      local kept = station_of(one.lock, one.ticket, one.parked.stations, before)
      lines[kept.name] = kept
    end
  end

  -- The lock in whose line the owner of a lease stands; nothing if the owner runs.
  local function place_of(owner)
    for _, lock in pairs(lines) do
      if lock.has_places == nil then lock.has_places = redis.call('EXISTS', lock.places) == 1 end
      if lock.has_places and redis.call('ZSCORE', lock.line, owner) then return lock end
    end
  end

  add(start)
  while found[nth] do
    local one = found[nth]
    local owners = waits_for(one)
    looked_at = looked_at + 1
    if not owners or looked_at > LOOKED_AT_MOST then return nil end
    one.waits_for = {}
    for _, owner in ipairs(owners) do
      local other = is_parked(owner) and waiting_ticket(one.at, owner)
      if is_parked(owner) and not other then return nil end
      if other then add(other) else in_slots[#in_slots + 1] = owner end
      table.insert(one.waits_for, other and other.name or owner)
    end
    nth = nth + 1
    if not found[nth] then  -- now all lines are known in which waiters in slots may stand
      for _, owner in ipairs(in_slots) do
        local at = place_of(owner)
        if at then add({name = owner, at = at, member = owner, joined = 0}) end
      end
    end
  end
  for _, owner in ipairs(in_slots) do
    if not found[owner] then return nil end
  end
  return found
end

-- The circle to which the way of a ticket leads; nothing if the ticket is not stuck.
local function circle_of(lock, ticket)
  local one = waiting_ticket(lock, member_of(ticket))
  local stuck = one and stuck_with(one)
  if not stuck then return nil end
  local way, seen = {}, {}
  while one and not seen[one.name] do
    way[#way + 1], seen[one.name] = one, #way + 1
    local youngest
    local in_front = one.is_behind and stuck[one.waits_for[1]] or one
    for _, name in ipairs(in_front.waits_for) do
      if not youngest or stuck[name].joined > youngest.joined then youngest = stuck[name] end
    end
    one = youngest
  end
  return one and {unpack(way, seen[one.name])}
end

-- Have the youngest ticket of a circle begin anew.  Returns, for people, that ticket, and ticket, task and stations of
-- each in the circle: {ticket, ticket, task, stations, ...}
local function open_circle(circle)
  local youngest, told = nil, {}
  for _, one in ipairs(circle) do
    if one.ticket and (not youngest or one.joined > youngest.joined) then youngest = one end
  end
  if not youngest then return nil end  -- waiters in slots alone: they have deadlines
  told[1] = youngest.ticket
  for _, one in ipairs(circle) do
    for _, part in ipairs(one.ticket and {
      one.ticket, string.match(one.parked.message, '"task":"([^"]*)"') or '?', write_stations(one.parked.stations),
    } or {}) do told[#told + 1] = part end
  end
  waiting_now = {}
  arrive_anew(youngest.lock, youngest.ticket, youngest.parked)
  recall_and_hand_off(youngest.lock)
  return told
end
