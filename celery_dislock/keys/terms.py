"""Terms: which other leases a lock admits beside one that is asked for; see ``_terms.lua``."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

MODES = {"exclusive": "x", "shared": "s"}  # as the scripts write them
KEPT_MOST = 1000  # terms whose text is remembered
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


ALONE = Terms()


@lru_cache(KEPT_MOST)
def written(terms: tuple[Terms, ...]) -> str:
    """Write the terms of several locks, or those of all, as the scripts read them."""
    return ",".join(f"{MODES[one.mode]} {one.limit}" for one in terms)
