-- _epoch.lua: by what workers know that the server has lost data: it came back empty, or with older data.
--   <prefix>:epoch:<broker>   string: "1 id swept_ms parked before lost_ms was left how"
--     1          version of this format.  Later ones begin with the same four fields
--     id         of this epoch: random; another one since the last loss
--     swept_ms   Redis TIME of the last sweep of all lines, or more if the clock was set back: it only grows
--     parked     how many tasks were parked then
--     before     id of the epoch that ended with the loss; "-": none was noticed
--     lost_ms    when the loss was noticed
--     was        how many tasks were parked before it, as the worker that has noticed it knew
--     left       how many there were then
--     how        "empty": there was no record   "older": it was older   "other": it was of another epoch
--
-- The worker that sweeps writes it, and each worker that may sweep remembers it.  A worker that finds no record, an
-- older one, or one of an epoch that does not follow the one it remembers, has found a loss, and writes that down.

-- include: _clock
-- include: _names

local NONE = '-'

local READ, LATER, DAMAGED = 0, 1, 2

-- The record and READ; nothing, if there is none.  LATER: a later release has written it, and nobody else may.
-- DAMAGED: it cannot be read, so it tells of no loss.
local function read_epoch(key)
  local is_text, text = pcall(redis.call, 'GET', key)
  if not text then return nil, READ end
  local version, id, swept, parked, rest = string.match(is_text and text or '', '^(%d+) (%x+) (%d+) (%d+)(.*)$')
  if not version then return nil, DAMAGED end
  local it = {id = id, swept = tonumber(swept), parked = parked, before = NONE, lost = 0, was = '0', left = '0', how = NONE}
  if version ~= '1' then return it, LATER end
  local before, lost, was, left, how = string.match(rest, '^ (%S+) (%d+) (%d+) (%d+) (%S+)$')
  if not before then return nil, DAMAGED end
  it.before, it.lost, it.was, it.left, it.how = before, tonumber(lost), was, left, how
  return it, READ
end

local function write_epoch(key, it)
  local swept, lost = string.format('%.0f', it.swept), string.format('%.0f', it.lost)
  local fields = {'1', it.id, swept, it.parked, it.before, lost, it.was, it.left, it.how}
  redis.call('DEL', key)  -- of any type; and a server without memory refuses no write that follows another
  redis.call('SET', key, table.concat(fields, ' '), 'PX', KEPT_MS)
end
