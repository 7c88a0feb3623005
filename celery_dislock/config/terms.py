"""Terms: which other leases a lock admits beside one that is asked for; see ``_terms.lua``.

They are made of a task's options, and travel as one value to the scripts and into the records,
where they are one word.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

MODES = {"exclusive": "x", "shared": "s"}  # as the scripts write them
KEPT_MOST = 1000  # terms whose text is remembered
NAMES = {letter: mode for mode, letter in MODES.items()}
_WORD = re.compile(rb"([xs]):(\d{1,15})")


class Terms(NamedTuple):
    """
    On which terms one lock is taken.

    Attributes:
        mode: "exclusive" or "shared".
        limit: Maximum number of leases of an exclusive lock at a time, > 0.
    """

    mode: str = "exclusive"
    limit: int = 1

    def stricter(self, other: Terms) -> Terms:
        """Return what admits no more than either, for a key that is declared twice."""
        return self._replace(limit=min(self.limit, other.limit))


ALONE = Terms()


@lru_cache(KEPT_MOST)
def written(terms: tuple[Terms, ...]) -> str:
    """Write the terms of several locks, or those of all, as the scripts read them."""
    return ",".join(f"{MODES[one.mode]}:{one.limit}" for one in terms)


def parsed(word: bytes) -> Terms:
    """Parse the terms in a record; of those that only a later release knows, what admits least."""
    found = _WORD.fullmatch(word)
    return Terms(NAMES[found[1].decode()], int(found[2])) if found else ALONE
