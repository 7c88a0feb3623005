"""Terms: which other leases a lock admits beside one that is asked for; see ``_terms.lua``."""

from __future__ import annotations

from typing import NamedTuple

MODES = {"exclusive": "x", "shared": "s"}  # as the scripts write them
NAMES = {letter: mode for mode, letter in MODES.items()}


class Terms(NamedTuple):
    """
    On which terms one lock is taken.

    Attributes:
        mode: "exclusive" or "shared".
        limit: Maximum number of leases of an exclusive lock at a time, > 0.
    """

    mode: str = "exclusive"
    limit: int = 1

    def __str__(self) -> str:
        return f"{MODES[self.mode]} {self.limit}"


ALONE = Terms()
