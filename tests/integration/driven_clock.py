"""A clock for the scripts that stands still until a test moves it.

The server is real and the scripts are those that the package sends, but for one thing: what they
read with TIME stands still until a step moves it, by a key of the test's own.  So leases end
exactly when a model says, and no step sleeps.  The expiry of keys follows: it is set a thousand
times longer than asked, and shortened by hand when time passes.
"""

from __future__ import annotations

import hashlib
import re
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

import redis

from celery_dislock.scripts import Script
from celery_dislock.servers.store import Store

if TYPE_CHECKING:
    import pytest

CLOCK = "clock"
START = 1_700_000_000  # seconds; where the clock begins
STRETCH = 1000  # times that keys live longer than asked

CLOCKED = f"""
local real = redis
local redis = {{call = function(command, ...)
  local args = {{...}}
  if command == 'TIME' then
    local us = real.call('INCR', '{CLOCK}')
    return {{math.floor(us / 1000000), us % 1000000}}
  elseif command == 'PEXPIRE' then
    return real.call('PEXPIRE', args[1], args[2] * {STRETCH})
  elseif command == 'PTTL' then
    local left = real.call('PTTL', args[1])
    return left < 0 and left or math.ceil(left / {STRETCH})
  elseif command == 'SET' and args[3] == 'PX' then
    return real.call('SET', args[1], args[2], 'PX', args[4] * {STRETCH})
  end
  return real.call(command, ...)
end}}
"""


@cache
def clocked(script: Script) -> Script:
    """Make the script read our clock."""
    commands = set(re.findall(r"redis\.call\('(\w+)'", script.text))
    assert not commands & {"EXPIRE", "EXPIREAT", "PEXPIREAT", "TTL", "SETEX", "PSETEX"}, commands
    assert not re.search(r"call\('SET'.*'(EX|EXAT|PXAT|KEEPTTL)'", script.text)
    text = CLOCKED + script.text
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def drive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all scripts that stores send read our clock."""
    for module in [one for name, one in sys.modules.items() if name.startswith("celery_dislock")]:
        for name, script in list(vars(module).items()):
            if isinstance(script, Script):
                monkeypatch.setattr(module, name, clocked(script))


def start(client: redis.Redis[Any]) -> None:
    """Empty the database, and let the clock begin."""
    client.flushdb()
    client.set(CLOCK, START * 1_000_000)


def keys(client: redis.Redis[Any]) -> set[str]:
    """Return the names of all keys but the clock; the client is one that speaks str."""
    return set(client.keys("*")) - {CLOCK}


def advance(client: redis.Redis[Any], seconds: float) -> None:
    """Let time pass, for the scripts and for the keys' expiry."""
    names = sorted(keys(client))
    left = {name: client.pttl(name) for name in names}
    client.incrby(CLOCK, round(seconds * 1_000_000))
    for name in names:
        if left[name] >= 0:
            client.pexpire(name, left[name] - round(seconds * 1000 * STRETCH))


class DrivenServer:
    """A real server under our clock, for tests that run on a LuaServer as well.

    Its scripts are those that :func:`drive` has changed.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._clients: list[redis.Redis | Store] = []
        self._client = self.client(decode_responses=True)
        self.begin()

    def client(self, **options: Any) -> redis.Redis:
        """Return a client of the server."""
        client = redis.Redis.from_url(self._url, **options)
        self._clients.append(client)
        return client

    def store(self, **options: Any) -> Store:
        """Return a store whose lock server this is."""
        store = Store(self._url, **options)
        self._clients.append(store)
        return store

    @property
    def now_ms(self) -> int:
        """Milliseconds of the clock."""
        return self.now_us // 1000

    @property
    def now_us(self) -> int:
        """Microseconds of the clock."""
        return int(self._client.get(CLOCK))

    def names(self) -> set[str]:
        """Return the names of all keys but the clock."""
        return keys(self._client)

    def ttls(self) -> dict[str, float]:
        """Return all keys, each with the milliseconds until it ends; -1: it does not."""
        ttls = {name: self._client.pttl(name) for name in self.names()}
        return {name: ttl / STRETCH if ttl > 0 else ttl for name, ttl in ttls.items()}

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        advance(self._client, seconds)

    def begin(self) -> None:
        """Lose all keys, and let the clock begin anew."""
        start(self._client)

    def end_keys(self) -> None:
        """Do nothing: advance() has ended the keys whose time is up."""

    def lose(self) -> None:
        """Lose all keys but the clock."""
        for name in self.names():
            self._client.delete(name)

    def close(self) -> None:
        """Close all clients and stores."""
        for client in self._clients:
            client.close()
