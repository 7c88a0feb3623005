"""A lock server inside this process: the scripts on bare Lua, under a clock that tests drive.

Redis runs the scripts on Lua 5.1, and so does this server.  The commands that they call are written
in Lua, too, and keep all keys in tables.  A call takes some 20 microseconds, so that a test can
take hundreds of thousands of random steps.  Time passes only when the test says so, by one
microsecond for each call beside that, and keys expire exactly as in Redis.

What is missing is all that the scripts do not call, and that replies can be lost: tests send a
command again, or do not.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import redis
from lupa.lua51 import LuaRuntime

from celery_dislock.exceptions import DamagedLockError
from celery_dislock.servers.reservations import Reservations
from celery_dislock.servers.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from celery_dislock.scripts import Script

START = 1_700_000_000  # seconds; where the clock begins

COMMANDS = r"""
local encode, decode, pack = ...
local keys, now, commands, called = {}, 0, {}, {}

local function wrong(what) error(what, 0) end

local function integer(text)
  return string.match(text, '^-?%d+$') and tonumber(text) or wrong('ERR value is not an integer')
end

local function find(name, kind)
  local key = keys[name]
  if key and key.ends and math.floor(now / 1000) > key.ends then
    keys[name], key = nil, nil
  end
  if key and kind and key.kind ~= kind then wrong('WRONGTYPE ' .. name) end
  return key
end

local function make(name, kind)
  local key = find(name, kind)
  if not key then
    key = {kind = kind, value = {}}
    keys[name] = key
  end
  return key.value
end

local function value_of(name, kind)
  local key = find(name, kind)
  return key and key.value or {}
end

local function tidy(name)  -- Redis deletes what has become empty
  if next(keys[name].value) == nil then keys[name] = nil end
end

local function count(value)
  local found = 0
  for _ in pairs(value) do found = found + 1 end
  return found
end

function commands.TIME()
  return {string.format('%.0f', math.floor(now / 1000000)), string.format('%.0f', now % 1000000)}
end

-- Keys of any kind.

function commands.EXISTS(...)
  local found = 0
  for _, name in ipairs({...}) do if find(name) then found = found + 1 end end
  return found
end

function commands.DEL(...)
  local found = commands.EXISTS(...)
  for _, name in ipairs({...}) do keys[name] = nil end
  return found
end

function commands.PEXPIRE(name, ttl)
  local key = find(name)
  if not key then return 0 end
  key.ends = math.floor(now / 1000) + integer(ttl)
  if integer(ttl) <= 0 then keys[name] = nil end
  return 1
end

function commands.KEYS()
  local found = {}
  for name in pairs(keys) do if find(name) then found[#found + 1] = name end end
  return found
end

function commands.TYPE(name) return {ok = (find(name) or {kind = 'none'}).kind} end

function commands.PTTL(name)
  local key = find(name)
  if not key then return -2 end
  return key.ends and key.ends - math.floor(now / 1000) or -1
end

-- Strings.

function commands.GET(name)
  local key = find(name, 'string')
  return key and key.value or false
end

function commands.SET(name, value, px, ttl)
  if not px then
    keys[name] = {kind = 'string', value = value}
    return {ok = 'OK'}
  end
  if px ~= 'PX' then wrong('ERR syntax error: only PX is known here') end
  if integer(ttl) <= 0 then wrong("ERR invalid expire time in 'set' command") end
  keys[name] = {kind = 'string', value = value, ends = math.floor(now / 1000) + integer(ttl)}
  return {ok = 'OK'}
end

-- Hashes.

function commands.HGET(name, field) return value_of(name, 'hash')[field] or false end
function commands.HEXISTS(name, field) return value_of(name, 'hash')[field] and 1 or 0 end
function commands.HSTRLEN(name, field) return #(value_of(name, 'hash')[field] or '') end
function commands.HLEN(name) return count(value_of(name, 'hash')) end

function commands.HSET(name, ...)
  local hash, new, given = make(name, 'hash'), 0, {...}
  for i = 1, #given, 2 do
    if not hash[given[i]] then new = new + 1 end
    hash[given[i]] = given[i + 1]
  end
  return new
end

function commands.HDEL(name, ...)
  local hash, found = value_of(name, 'hash'), 0
  for _, field in ipairs({...}) do
    if hash[field] then hash[field], found = nil, found + 1 end
  end
  if found > 0 then tidy(name) end
  return found
end

function commands.HINCRBY(name, field, by)
  local hash = make(name, 'hash')
  local sum = integer(hash[field] or '0') + integer(by)
  hash[field] = string.format('%.0f', sum)
  return sum
end

function commands.HGETALL(name)
  local found = {}
  for field, value in pairs(value_of(name, 'hash')) do
    found[#found + 1], found[#found + 2] = field, value
  end
  return found
end

function commands.HKEYS(name)
  local found = {}
  for field in pairs(value_of(name, 'hash')) do found[#found + 1] = field end
  return found
end

function commands.HRANDFIELD(name, most)  -- always the same ones
  return {unpack(commands.HKEYS(name), 1, math.min(integer(most), commands.HLEN(name)))}
end

function commands.HSCAN(name) return {'0', commands.HGETALL(name)} end

-- Lists.

function commands.RPUSH(name, ...)
  local list = make(name, 'list')
  for _, value in ipairs({...}) do list[#list + 1] = value end
  return #list
end

function commands.LPUSH(name, ...)
  for _, value in ipairs({...}) do table.insert(make(name, 'list'), 1, value) end
  return commands.LLEN(name)
end

function commands.LREM(name, most, value)
  local list, kept, removed = value_of(name, 'list'), {}, 0
  if integer(most) <= 0 then wrong('ERR only from the head is known here') end
  for _, one in ipairs(list) do
    local goes = one == value and removed < integer(most)
    if goes then removed = removed + 1 else kept[#kept + 1] = one end
  end
  if find(name) then
    keys[name].value = kept
    tidy(name)
  end
  return removed
end

function commands.LINDEX(name, nth)
  local list = value_of(name, 'list')
  nth = integer(nth)
  return list[nth < 0 and #list + nth + 1 or nth + 1] or false
end

function commands.LSET(name, nth, value)
  local list = value_of(name, 'list')
  nth = integer(nth)
  nth = nth < 0 and #list + nth + 1 or nth + 1
  if not list[nth] then wrong('ERR index out of range') end
  list[nth] = value
  return {ok = 'OK'}
end

function commands.LTRIM(name, first, last)
  local list = value_of(name, 'list')
  last = integer(last) < 0 and #list + last or integer(last)
  local kept = {unpack(list, integer(first) + 1, math.min(last + 1, #list))}
  if find(name) then
    keys[name].value = kept
    tidy(name)
  end
  return {ok = 'OK'}
end

function commands.LLEN(name) return #value_of(name, 'list') end

function commands.LRANGE(name, first, last)
  local list = value_of(name, 'list')
  if integer(last) < 0 then last = #list + last end
  return {unpack(list, integer(first) + 1, math.min(last + 1, #list))}
end

function commands.LPOP(name)
  local first = table.remove(value_of(name, 'list'), 1)
  if first then tidy(name) end
  return first or false
end

-- Sorted sets.

local function in_order(name)
  local zset, members = value_of(name, 'zset'), {}
  for member in pairs(zset) do members[#members + 1] = member end
  table.sort(members, function(a, b)
    if zset[a] ~= zset[b] then return zset[a] < zset[b] end
    return a < b
  end)
  return members, zset
end

local function score(number) return string.format('%.17g', number) end

function commands.ZCARD(name) return count(value_of(name, 'zset')) end

function commands.ZSCORE(name, member)
  local found = value_of(name, 'zset')[member]
  return found and score(found) or false
end

function commands.ZADD(name, number, member)
  local zset = make(name, 'zset')
  local new = zset[member] and 0 or 1
  zset[member] = tonumber(number) or wrong('ERR value is not a valid float')
  return new
end

function commands.ZREM(name, member)
  local zset = value_of(name, 'zset')
  if not zset[member] then return 0 end
  zset[member] = nil
  tidy(name)
  return 1
end

function commands.ZRANK(name, member)
  for rank, other in ipairs((in_order(name))) do if other == member then return rank - 1 end end
  return false
end

function commands.ZRANGE(name, first, last, scores)
  local members, zset = in_order(name)
  first, last = integer(first), integer(last)
  if first < 0 then first = math.max(#members + first, 0) end
  if last < 0 then last = #members + last end
  local found = {}
  for i = first + 1, math.min(last + 1, #members) do
    found[#found + 1] = members[i]
    if scores then found[#found + 1] = score(zset[members[i]]) end
  end
  return found
end

function commands.ZRANGEBYSCORE(name, least, most)
  if least ~= '-inf' then wrong('ERR only -inf is known here') end
  local members, zset = in_order(name)
  local found = {}
  for _, member in ipairs(members) do
    if zset[member] <= tonumber(most) then found[#found + 1] = member end
  end
  return found
end

local function call(command, ...)
  local given = {...}
  called[#called + 1] = command .. ' ' .. tostring(given[1])
  for i = 1, select('#', ...) do
    if type(given[i]) == 'number' then given[i] = string.format('%.17g', given[i])
    elseif type(given[i]) ~= 'string' then wrong('ERR an argument is neither text nor a number') end
  end
  return (commands[command] or wrong('ERR this server has no command ' .. command))(unpack(given))
end

-- Scripts see what Redis shows them, and no other global name.
local load, set = loadstring, rawset
redis = {call = call, pcall = function(...)
  local done, reply = pcall(call, ...)
  return done and reply or {err = reply}
end}
cjson = {encode = encode, decode = decode}
for _, name in ipairs({'io', 'os', 'require', 'package', 'dofile', 'loadfile', 'python'}) do
  _G[name] = nil
end
setmetatable(_G, {
  __index = function(_, name) error('no global variable ' .. tostring(name), 2) end,
  __newindex = function(_, name) error('a new global variable ' .. tostring(name), 2) end,
})

return {
  compile = function(text) return assert(load(text)) end,
  run = function(script, number, ...)
    now = now + 1
    called = {}
    set(_G, 'KEYS', {unpack({...}, 1, number)})
    set(_G, 'ARGV', {select(number + 1, ...)})
    return script()
  end,
  call = call,
  pass = function(us) now = now + us end,
  now = function() return now end,
  lose = function() keys = {} end,
  copy = function()
    local copied = {}
    for name, key in pairs(keys) do
      local value = key.value
      if type(value) == 'table' then
        value = {}
        for field, one in pairs(key.value) do value[field] = one end
      end
      copied[name] = {kind = key.kind, value = value, ends = key.ends}
    end
    return copied
  end,
  become = function(copied) keys = copied end,
  called = function() return called end,
  contents = function()
    local found = {}
    for name in pairs(keys) do
      local key = find(name)
      if key then found[name] = key.value end
    end
    return found
  end,
  ttls = function()
    local found = {}
    for name in pairs(keys) do
      local ttl = commands.PTTL(name)
      if ttl ~= -2 then found[name] = ttl end
    end
    return found
  end,
}
"""


def _encode(table: Any) -> bytes:
    """Stand for ``cjson.encode``."""
    return json.dumps(_plain(table), separators=(",", ":"), ensure_ascii=False).encode(*RAW)


RAW = "utf-8", "surrogateescape"


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode(*RAW)
    if not hasattr(value, "items"):
        return value
    if value[1] is not None:
        return [_plain(one) for one in value.values()]
    return {name.decode(): _plain(one) for name, one in value.items()}


def _decoder(lua: LuaRuntime) -> Callable[[bytes], Any]:
    """Stand for ``cjson.decode``."""

    def of(value: Any) -> Any:
        if isinstance(value, str):
            return value.encode(*RAW)
        if isinstance(value, list):
            return lua.table_from([of(one) for one in value])
        if isinstance(value, dict):
            return lua.table_from({of(name): of(one) for name, one in value.items()})
        return value

    def decode(written: bytes) -> Any:
        return of(json.loads(written.decode(*RAW)))

    return decode


def _reply(value: Any) -> Any:
    """Convert what a script has returned, as Redis does."""
    if isinstance(value, bytes):
        return value
    if value is None or value is False:
        return None
    if value is True:
        return 1
    if isinstance(value, (int, float)):
        return int(value)
    if value[b"ok"] is not None:
        return value[b"ok"]
    assert value[b"err"] is None, value[b"err"]
    listed = []
    while (one := value[len(listed) + 1]) is not None:
        listed.append(_reply(one))
    return listed


class LuaServer:
    """
    A lock server that is not a process; see :class:`celery_dislock.servers.server.Server`.

    Raises the error of a script as it is, and never a StoreError.  For one thread only.

    Args:
        changed: Changes the text of each script, for tests that break one.
    """

    name = "lua"
    keeps_lines = True
    kind = "single"
    min_replicas = 0

    def __init__(self, changed: Callable[[str], str] = str) -> None:
        lua = LuaRuntime(encoding=None, unpack_returned_tuples=True)
        self._lua = lua.execute(COMMANDS.encode(), _encode, _decoder(lua))
        self._run = self._lua[b"run"]
        self._changed = changed
        self._scripts: dict[str, Any] = {}
        self.advance(START)
        self.replicate()

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._lua[b"pass"](round(seconds * 1_000_000))

    @property
    def now_ms(self) -> int:
        """Milliseconds of the clock."""
        return self.now_us // 1000

    @property
    def now_us(self) -> int:
        """Microseconds of the clock."""
        return int(self._lua[b"now"]())

    def client(self, *, decode_responses: bool = False) -> LuaClient:
        """Return a client that speaks bytes, or text."""
        return LuaClient(self, decode_responses=decode_responses)

    def names(self) -> set[str]:
        """Return the names of all keys."""
        return {name.decode() for name in self.send("KEYS")}

    def begin(self) -> None:
        """Lose all keys, and move the clock to a whole second."""
        self.lose()
        self._lua[b"pass"](1_000_000 - int(self._lua[b"now"]()) % 1_000_000)

    def end_keys(self) -> None:
        """End the keys whose time is up; Redis keeps them for this last millisecond."""
        for name, ttl in self.ttls().items():
            if ttl == 0:
                self.send("DEL", name)

    def lose(self) -> None:
        """Lose all keys, as a failover to an empty server does."""
        self._lua[b"lose"]()

    def replicate(self) -> None:
        """Let the replica have what this server has."""
        self._replica = self._lua[b"copy"]()

    def fail_over(self) -> None:
        """Lose what has changed since :meth:`replicate`."""
        self._lua[b"become"](self._replica)
        self.replicate()

    def called(self) -> list[str]:
        """Return what the last script has called: each command with its first argument."""
        return [one.decode() for one in self._lua[b"called"]().values()]

    def contents(self) -> dict[str, Any]:
        """Return all keys, each with what it holds."""
        return {
            name.decode(): value if isinstance(value, bytes) else dict(value.items())
            for name, value in self._lua[b"contents"]().items()
        }

    def ttls(self) -> dict[str, int]:
        """Return all keys, each with the milliseconds until it ends; -1: it does not."""
        return {name.decode(): ttl for name, ttl in self._lua[b"ttls"]().items()}

    def run(self, script: Script, keys: Sequence[str], *arguments: str | bytes | int) -> Any:
        """Run a script."""
        compiled = self._scripts.get(script.sha)
        if compiled is None:
            compiled = self._lua[b"compile"](self._changed(script.text).encode())
            self._scripts[script.sha] = compiled
        return _reply(self._run(compiled, len(keys), *map(_sent, (*keys, *arguments))))

    def exchange(
        self, script: Script, keys: Sequence[str], *arguments: str | bytes | int
    ) -> tuple[Any, bool]:
        """Run a script; no reply is lost."""
        return self.run(script, keys, *arguments), False

    def run_many(
        self, script: Script, calls: Sequence[tuple[str | bytes | int, ...]], *, within: float
    ) -> list[Any]:
        """Run a script many times; a damaged lock harms no other."""
        replies = []
        for key, *arguments in calls:
            try:
                replies.append(self.run(script, [str(key)], *arguments))
            except DamagedLockError as exc:
                replies.append(exc)
        return replies

    def send(self, *command: str | bytes | int) -> Any:
        """Run one of the commands that scripts call."""
        return _reply(self._lua[b"call"](*map(_sent, command)))

    def close(self) -> None:
        """Do nothing: there are no connections."""

    def known_as(self, owner: str) -> str:
        """Return the name under which the server knows an owner: the same."""
        return owner

    def together(self, keys: Sequence[str]) -> list[Sequence[str]]:
        """Return all keys as one group."""
        return [keys]

    def pop(self, key: str, seconds: float) -> bytes | None:
        """Take an element from a list, if there is one."""
        popped: bytes | None = self.send("LPOP", key)
        return popped

    def store(self, **options: Any) -> Store:
        """Return a store whose lock server this is."""
        store = Store("redis://nowhere", **options)
        store.lock_server = self
        store.reservations = Reservations(self)
        return store


class LuaClient(redis.Redis):
    """What tests ask a real server, asked of this one; the commands are those of COMMANDS."""

    def __init__(self, server: LuaServer, *, decode_responses: bool) -> None:
        super().__init__(protocol=2)
        self._server = server
        self._decodes = decode_responses

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Run a command; return the reply as redis-py does."""
        options.pop("keys", None)  # for a cache
        reply = self._server.send(*args)
        if self._decodes:
            reply = _decoded(reply)
        callback = self.response_callbacks.get(args[0])
        return reply if callback is None else callback(reply, **options)


def _decoded(reply: Any) -> Any:
    if isinstance(reply, list):
        return list(map(_decoded, reply))
    return reply.decode() if isinstance(reply, bytes) else reply


def _sent(argument: str | bytes | int) -> bytes:
    return argument if isinstance(argument, bytes) else str(argument).encode()
