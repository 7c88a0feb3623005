"""The Lua scripts of the store, one file per operation.

A line ``-- include: _lease`` stands for that part, which says how a lease is written; ``_parked``
says how parked tasks are, and is included where the first of it is needed, not before.

The server knows a script by its digest once it was sent its text.  So a script is sent by its
digest, and by its text after the error ``NOSCRIPT``.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

from celery_dislock.scripts.files import read_lua

CALL = re.compile(r"redis\.p?call(?:\(|, )'([A-Z]+)'")

if TYPE_CHECKING:
    from collections.abc import Sequence

    Argument = str | bytes | float


@dataclass(frozen=True)
class Script:
    """A Lua script as the server knows it."""

    text: str
    sha: str

    @classmethod
    def load(cls, name: str) -> Script:
        """Read a script that is part of this package, with the parts that it includes."""
        text = read_lua(name)
        return cls(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())

    def by_digest(self, keys: Sequence[Argument], *arguments: Argument) -> tuple[Argument, ...]:
        """Return the command that runs it where the server has its text already."""
        return (b"EVALSHA", self.sha, len(keys), *keys, *arguments)

    def by_text(self, keys: Sequence[Argument], *arguments: Argument) -> tuple[Argument, ...]:
        """Return the command that runs it anywhere, and leaves its text with the server."""
        return (b"EVAL", self.text, len(keys), *keys, *arguments)


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

# How replies begin that have more than one shape; _states.lua has the same.
REFUSED, GRANTED, PARKED, DONE, FULL = range(5)  # of acquire.lua and park.lua
NOT_THERE, LEFT, RAN_HERE = range(3)  # of leave.lua


@cache
def commands() -> tuple[str, ...]:
    """Return the commands of Redis that the scripts run."""
    files = [file for file in resources.files(__name__).iterdir() if file.name.endswith(".lua")]
    return tuple(sorted({name for file in files for name in CALL.findall(file.read_text("utf-8"))}))
