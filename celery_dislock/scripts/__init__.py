"""The Lua scripts of the store, one file per operation.

A line ``-- include: _lease`` is replaced by the text of ``_lease.lua``, which describes how a lease
is stored.  ``_parked.lua`` describes how parked tasks are stored.  ``release.lua`` includes it only
after the point where most calls have returned.

The server caches a script under its digest after the first call with the script's text.  A script
is therefore sent by its digest, and sent by its text only after the error ``NOSCRIPT``.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from celery_dislock.scripts.files import read_lua

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ARGUMENTS = re.compile(r"^(?:local )?(\w+(?:,\s+\w+)*) = unpack\(ARGV\)$", re.MULTILINE)
CAPITALS = re.compile(r"\b[A-Z]+\b")
NUMBER = re.compile(r"^local TAKE_UP_MS = (\d+)", re.MULTILINE)
KEY = re.compile(r"^local ([A-Z]+) = ':.*\n", re.MULTILINE)  # a key's name, of _names.lua
TIMES_KEPT = 100  # times whose conversion is remembered: those of settings, mostly


@dataclass(frozen=True)
class Script:
    """A Lua script and its digest."""

    text: str
    sha: str

    @classmethod
    def load(cls, name: str, within: str = "") -> Script:
        """
        Read a script of this package, with its includes; *within* another, around it.

        Names of keys that it does not use are left out: Lua has room for 200 local variables.
        """
        text = read_lua(name, within)
        uses = Counter(CAPITALS.findall(text))
        text = KEY.sub(lambda found: "" if uses[found[1]] == 1 else found[0], text)
        return cls(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())

    @cached_property
    def names(self) -> list[str]:
        """Names of the arguments that the script's text unpacks, in their order."""
        return re.findall(r"\w+", "".join(ARGUMENTS.findall(self.text)))

    @cached_property
    def arguments(self) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
        """Put arguments in their order, by their names."""
        return itemgetter(*self.names)


ACQUIRE = Script.load("acquire")
RENEW = Script.load("renew")
RENEW_STALLED = Script.load("renew_stalled")
RELEASE = Script.load("release")
RELEASE_DEAD = Script.load("release_dead")
SPENT = Script.load("spent")
LOOK = Script.load("look")
FIND = Script.load("find")
WHERE = Script.load("where")
OVERRIDE = Script.load("override")
FREE = Script.load("free")
TAKE_OVER = Script.load("take_over")
MARK = Script.load("mark")
CRASH = Script.load("crash")
PARK = Script.load("park")
LEAVE = Script.load("leave")
KNOWS = Script.load("knows")
DROP = Script.load("drop")
KEEP_TURN = Script.load("keep_turn")
GIVE_BACK = Script.load("give_back")
PUT_BACK = Script.load("put_back")
SWEEP = Script.load("sweep")
ENLIST = Script.load("enlist")
LINES = Script.load("lines")
EPOCH = Script.load("epoch")
ASIDE = Script.load("aside")
RESERVE = Script.load("reserve")
CONFIRM = Script.load("confirm")
UNRESERVE = Script.load("unreserve")
BEGIN = Script.load("begin")
ACQUIRE_UNIQUE = Script.load("acquire", within="_begins")
PARK_UNIQUE = Script.load("park", within="_begins")
RELEASE_UNIQUE = Script.load("release", within="_ends")
COUNT = Script.load("count")
COUNTS = Script.load("counts")
TICK = Script.load("tick")
TICKS = Script.load("ticks")

# First element of replies that have more than one shape; the same numbers are in _states.lua.
REFUSED, GRANTED, PARKED, DONE, FULL = range(5)  # of acquire.lua and park.lua
REPLACED_BY = 5  # of _begins.lua
UNLISTED, LATER = 6, 7  # of park.lua
NOT_THERE, HAS_LEFT, LEFT_BEFORE = range(3)  # of leave.lua

TAKE_UP_MS = int(NUMBER.findall(read_lua("_record"))[0])


@lru_cache(TIMES_KEPT)
def milliseconds(seconds: float) -> int:
    """Convert seconds to milliseconds, rounded up so that no lease ends early."""
    return -int(-seconds * 1000 // 1)
