"""The Lua scripts of the store, one file per operation.

Each is sent with ``_lease.lua`` in front, which says how a lease is written.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources

HEADER = "_lease"  # the script part that every script begins with


@dataclass(frozen=True)
class Script:
    """A Lua script as the server knows it."""

    text: str
    sha: str

    @classmethod
    def load(cls, name: str) -> Script:
        """Read a script that is part of this package."""
        folder = resources.files(__name__)
        parts = [(folder / f"{part}.lua").read_text("utf-8") for part in (HEADER, name)]
        text = "\n".join(parts)
        return cls(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


ACQUIRE = Script.load("acquire")
RENEW = Script.load("renew")
RELEASE = Script.load("release")
RELEASE_DEAD = Script.load("release_dead")
HOLDERS = Script.load("holders")
TAKE_OVER = Script.load("take_over")
REMEMBER = Script.load("remember")
RECALL = Script.load("recall")
