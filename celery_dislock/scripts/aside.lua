-- aside.lua: read a page of the tickets that were set aside, after taking some out.
--
-- KEYS[1]   lock
-- ARGV[1]   cursor     0 for the first page
-- ARGV[2]   count      of tickets, more or less
-- ARGV[3]   ticket...  that a person has dealt with, to be taken out first
--
-- Returns   {cursor, {ticket, record, ...}}   cursor: of the next page; 0: this was the last
-- Touches the hash of what was set aside, and nothing else.

-- include: _names

for nth = 3, #ARGV do redis.call('HDEL', KEYS[1] .. ASIDE, ARGV[nth]) end
return redis.call('HSCAN', KEYS[1] .. ASIDE, ARGV[1], 'COUNT', ARGV[2])
