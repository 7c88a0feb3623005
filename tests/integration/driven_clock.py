"""A clock for the scripts that stands still until a test moves it.

The server is real and the scripts are those that the package sends, but for one thing: what they
read with TIME stands still until a step moves it, by a key of the test's own.  So leases end
exactly when a model says, and no step sleeps.  The expiry of keys follows: it is set a thousand
times longer than asked, and shortened by hand when time passes.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Any

from celery_dislock.scripts import Script

if TYPE_CHECKING:
    import redis

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


def clocked(script: Script) -> Script:
    """Make the script read our clock."""
    commands = set(re.findall(r"redis\.call\('(\w+)'", script.text))
    assert not commands & {"EXPIRE", "EXPIREAT", "PEXPIREAT", "TTL", "SETEX", "PSETEX"}, commands
    assert not re.search(r"call\('SET'.*'(EX|EXAT|PXAT|KEEPTTL)'", script.text)
    text = CLOCKED + script.text
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


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
