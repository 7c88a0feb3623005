-- try.lua: try commands that the scripts run, to find those that the server refuses to its user.
--
-- ARGV[1]   name       of a key that nobody uses; no KEYS, so that any node of a cluster runs it
-- ARGV[2]   command, and so on
--
-- Returns   {command, error, ...}   of each that ended in an error; what it means, the caller knows
-- Touches that key alone, and leaves nothing behind.  Each command is given as many arguments as it
-- takes to be run.

local MOST_ARGS = 8
local failed = {}
for i = 2, #ARGV do
  local command, args, problem = ARGV[i], {}
  repeat
    local reply = redis.pcall(command, unpack(args))
    problem = type(reply) == 'table' and reply.err
    args[#args + 1] = #args == 0 and ARGV[1] or '1'
  until #args > MOST_ARGS or not (problem and string.find(problem, 'rong number of arg'))
  if problem then
    failed[#failed + 1] = command
    failed[#failed + 1] = problem
  end
end
redis.pcall('DEL', ARGV[1])
redis.pcall('PEXPIRE', ARGV[1], 1)  -- where it may not be deleted
return failed
