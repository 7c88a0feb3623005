-- count.lua: add what a process has counted to the counts of its worker.
--
-- KEYS[1]   index     zset: name of a worker's counts -> Redis TIME in ms at which some were added
-- ARGV[1]   counts    name of a hash: what is counted -> integer
-- ARGV[2]   kept_ms   how long the counts live after the last addition
-- ARGV[3]   most      workers whose counts are kept; those that added last
-- ARGV[4]   fields    that a worker's counts may have; others are dropped
-- ARGV[5]   field, amount, ...   integers > 0; none: nothing is changed
--
-- Returns   1
-- Touches the index and what it names, which are in one slot of a cluster.  Sent twice, it counts twice.

local index, counts, kept_ms = KEYS[1], ARGV[1], tonumber(ARGV[2])
local most, fields = tonumber(ARGV[3]), tonumber(ARGV[4])
if #ARGV == 4 then return 1 end

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local room = fields - redis.call('HLEN', counts)
redis.call('ZADD', index, now, counts)  -- first: a server without memory refuses this, and all is sent again
redis.call('PEXPIRE', index, kept_ms)
for i = 5, #ARGV, 2 do
  local is_there = room > 0 or redis.call('HEXISTS', counts, ARGV[i]) == 1
  if is_there and pcall(redis.call, 'HINCRBY', counts, ARGV[i], ARGV[i + 1]) then
    room = room - 1  -- also for a field that is there already: some new ones then come with the next batch only
  end
end
redis.call('PEXPIRE', counts, kept_ms)

for _, ended in ipairs(redis.call('ZRANGEBYSCORE', index, '-inf', now - kept_ms, 'LIMIT', 0, 100)) do
  redis.call('ZREM', index, ended)  -- its hash has expired
end
if redis.call('ZCARD', index) > most then
  local oldest = redis.call('ZRANGE', index, 0, 0)[1]
  redis.call('DEL', oldest)
  redis.call('ZREM', index, oldest)
end
return 1
