"""The Lua scripts of the store, one file per operation.

Each is sent with ``_lease.lua`` in front, which says how a lease is written; those that can give a
parked task its turn with ``_parked.lua`` after that.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources

LEASE, LINE = "_lease", "_parked"  # the parts that scripts begin with


@dataclass(frozen=True)
class Script:
    """A Lua script as the server knows it."""

    text: str
    sha: str

    @classmethod
    def load(cls, *names: str) -> Script:
        """Read a script that is part of this package, with what it begins with."""
        folder = resources.files(__name__)
        parts = [(folder / f"{name}.lua").read_text("utf-8") for name in names]
        text = "\n".join(parts)
        return cls(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


ACQUIRE = Script.load(LEASE, "acquire")
RENEW = Script.load(LEASE, "renew")
RELEASE = Script.load(LEASE, LINE, "release")
RELEASE_DEAD = Script.load(LEASE, LINE, "release_dead")
HOLDERS = Script.load(LEASE, "holders")
TAKE_OVER = Script.load(LEASE, "take_over")
REMEMBER = Script.load(LEASE, "remember")
RECALL = Script.load(LEASE, "recall")
PARK = Script.load(LEASE, LINE, "park")
LEAVE = Script.load(LEASE, LINE, "leave")
SWEEP = Script.load(LEASE, LINE, "sweep")
ENLIST = Script.load("enlist")
DELIST = Script.load("delist")
LINES = Script.load("lines")

REFUSED, GRANTED, PARKED, DONE, FULL = range(5)  # how park.lua's answers begin, and acquire.lua's
