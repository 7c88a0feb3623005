"""The Lua scripts of the store, one file per operation.

A line ``-- include: _lease`` stands for that part, which says how a lease is written; ``_parked``
says how parked tasks are, and is included where the first of it is needed, not before.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

CALL = re.compile(r"redis\.p?call(?:\(|, )'([A-Z]+)'")
INCLUDE = re.compile(r"^-- include: (\w+)$", re.MULTILINE)


@dataclass(frozen=True)
class Script:
    """A Lua script as the server knows it."""

    text: str
    sha: str

    @classmethod
    def load(cls, name: str) -> Script:
        """Read a script that is part of this package, with the parts that it includes."""
        text = _read(name)
        return cls(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def _read(name: str) -> str:
    text = (resources.files(__name__) / f"{name}.lua").read_text("utf-8")
    return INCLUDE.sub(lambda found: _read(found[1]), text)


ACQUIRE = Script.load("acquire")
RENEW = Script.load("renew")
RELEASE = Script.load("release")
RELEASE_DEAD = Script.load("release_dead")
HOLDERS = Script.load("holders")
TAKE_OVER = Script.load("take_over")
REMEMBER = Script.load("remember")
RECALL = Script.load("recall")
PARK = Script.load("park")
LEAVE = Script.load("leave")
WITHDRAW = Script.load("withdraw")
GIVE_BACK = Script.load("give_back")
SWEEP = Script.load("sweep")
ENLIST = Script.load("enlist")
DELIST = Script.load("delist")
LINES = Script.load("lines")
TRY = Script.load("try")

# What the keys of a lock are, by what follows its name.
KINDS = {
    "": "hash",
    ":line": "zset",
    ":places": "hash",
    ":tickets": "hash",
    ":handed": "zset",
    ":running": "hash",
    ":replaced": "hash",
    ":aside": "hash",
}

REFUSED, GRANTED, PARKED, DONE, FULL = range(5)  # how park.lua's answers begin, and acquire.lua's


@cache
def commands() -> tuple[str, ...]:
    """Return the commands of Redis that the scripts run."""
    files = [file for file in resources.files(__name__).iterdir() if file.name.endswith(".lua")]
    return tuple(sorted({name for file in files for name in CALL.findall(file.read_text("utf-8"))}))
