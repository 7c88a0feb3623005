-- _names.lua: the names of a lock's keys.  No other file spells them; names.py reads them from here.
--
-- A lock <prefix>:{<key>} is a hash of that name, which has its leases; see _lease.lua.  Its other keys
-- begin with that name, so they are in the same slot of a cluster, and end as written here.  An
-- ending with ":" at its end is followed by an owner, a ticket, a task id, or numbers.

local LINE = ':line'          -- zset    owner, or "<ticket>#" -> when it joined, Redis TIME in microseconds
local PLACES = ':places'      -- hash    owner -> what it waits for; see _record.lua
local WAKE = ':wake:'         -- list    owner: news for it while it waits; see _line.lua
local TICKETS = ':tickets'    -- hash    ticket -> what is parked; see _parked.lua
local HANDED = ':handed'      -- zset    ticket -> Redis TIME in ms at which its turn ends
local RUNNING = ':running'    -- hash    ticket -> its claim
local REPLACED = ':replaced'  -- hash    ticket -> message of a task that was replaced or dropped
local ASIDE = ':aside'        -- hash    ticket -> record that nobody could read or run, for people to see
local DONE = ':done:'         -- string  ticket, owner or "~<ticket>": the mark that it is done; see _parked.lua
local CRASHES = ':crashes:'   -- hash    ticket: how often its process has died; see crash.lua
local MARK = ':mark:'         -- string  task id: a mark about it; see mark.lua
local UNSENT = ':unsent:'     -- string  id of a task that was not sent: the task that the key was reserved for
local UNIQUE = ':unique'      -- string  which message the key is reserved for; see _unique.lua
local NEWEST = ':newest'      -- hash    which tasks were sent last; see _newest.lua
local LIMIT = ':limit'        -- string  what an operator has set; see _override.lua
local STARTS = ':starts'      -- list    when it was taken, of a lock with a rate; see _rate.lua
local LASTED = ':lasted'      -- string  how long bodies took lately; see _lasted.lua
local BEAT = ':beat'          -- hash    entry of beat's schedule: when it was last sent; see _beat.lua
local NEVER = ':?'            -- none    a key that never exists; see line_exists()

local KEPT_MS = 2592000000    -- thirty days without a worker, for lines of parked tasks and what lists them
