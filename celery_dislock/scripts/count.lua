-- count.lua: add what a process has counted to the counts of its worker.
--
-- KEYS[1]   index     zset: name of a worker's counts -> Redis TIME in ms at which some were added
-- ARGV[1]   number    of this batch; a process numbers the batches of a worker from 1
-- ARGV[2]   seen      name of a string: the number of the last batch of this process and worker
-- ARGV[3]   counts    name of a hash: what is counted -> integer; and since, see below
-- ARGV[4]   kept_ms   how long the counts live after the last batch
-- ARGV[5]   seen_ms   how long the number is kept after the last batch
-- ARGV[6]   most      workers whose counts are kept; those that added last
-- ARGV[7]   fields    that a worker's counts may have; others are dropped
-- ARGV[8]   field, amount, ...   integers > 0
--
-- Returns   1 added    0 this batch was added before: nothing was changed
--
-- Touches the index and what it names.  All have one hash tag, so they are in one slot of a cluster.
-- Sent twice, a batch counts once: its number is kept with the counts.  The hash's field "since" is the
-- Redis TIME in ms at which it was made: counts that begin anew have another one.

local index, number, seen, counts = KEYS[1], tonumber(ARGV[1]), ARGV[2], ARGV[3]
local kept_ms, seen_ms = tonumber(ARGV[4]), tonumber(ARGV[5])
local most, fields = tonumber(ARGV[6]), tonumber(ARGV[7])

local SINCE = 'since'
local LEFT_OUT_MOST = 100  -- workers whose counts one batch removes: those that come next do the others

if tonumber(redis.call('GET', seen) or 0) >= number then return 0 end
-- First, so that a field that cannot be added to does not make the others count twice.
redis.call('SET', seen, number, 'PX', seen_ms)

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if redis.call('EXISTS', counts) == 0 then
  redis.call('HSET', counts, SINCE, string.format('%.0f', now))
end
local room = fields - redis.call('HLEN', counts)
for i = 8, #ARGV, 2 do
  local is_there = room > 0 or redis.call('HEXISTS', counts, ARGV[i]) == 1
  if is_there and pcall(redis.call, 'HINCRBY', counts, ARGV[i], ARGV[i + 1]) then
    room = room - 1  -- or is there already: then fewer are let in now, and the rest with the next batch
  end
end
redis.call('PEXPIRE', counts, kept_ms)

redis.call('ZADD', index, now, counts)
redis.call('PEXPIRE', index, kept_ms)
local too_many = math.max(redis.call('ZCARD', index) - most, 0)
local ended = redis.call('ZRANGEBYSCORE', index, '-inf', now - kept_ms, 'LIMIT', 0, LEFT_OUT_MOST)
if too_many > #ended then
  ended = redis.call('ZRANGE', index, 0, math.min(too_many, LEFT_OUT_MOST) - 1)
end
for _, other in ipairs(ended) do
  redis.call('DEL', other)
  redis.call('ZREM', index, other)
end
return 1
