"""Note in the history for how long a lease is trusted."""

from __future__ import annotations

import os
import time
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from celery_dislock.locks.lease import Lease
    from proof.history import History

STEP = 0.005  # seconds between two looks at a lease
NOTED = 0.05  # seconds between two of those looks that are noted

_numbers = count()


def name() -> str:
    """Return a name that no other process, and nothing else in this one, has."""
    return f"{os.getpid()}:{next(_numbers)}"


class Holding:
    """
    A lease of one lock or of several, from its grant to the end of the body.

    Args:
        history: Where it is noted.
        lease: The lease.
        asked: When the lock was asked for.
        limits: By key, the limit of each that has one of its own.
        terms: Limit, mode, rate and timeout, as the checker wants to know them.
    """

    def __init__(
        self,
        history: History,
        lease: Lease,
        asked: float,
        *,
        limits: Mapping[str, int] = {},
        **terms: object,
    ) -> None:
        self._names = {key: name() for key in lease.tokens}
        self._history = history
        self._lease = lease
        at = self._seen = self._noted = time.monotonic()
        # The process may have been stopped since the grant: then the lease was never trusted.
        self._begun = self._trusted = lease.held
        if self._begun:
            for key, token in lease.tokens.items():
                more = {"key": key, "asked": asked, "since": lease.since, "token": token, **terms}
                if key in limits:
                    more["limit"] = limits[key]
                history.add("hold", self._names[key], "begin", at=at, **more)

    def trust(self, seconds: float) -> None:
        """Look at the lease until the time is over, or it is lost."""
        for pause in self.looks(seconds):
            time.sleep(pause)

    def looks(self, seconds: float) -> Iterator[float]:
        """Do so; yields the seconds to sleep until the next look."""
        until = time.monotonic() + seconds
        while self._look() and time.monotonic() < until:
            yield STEP

    def end(self) -> None:
        """Note that the body ends: called before the release."""
        at = time.monotonic()
        if self._begun:
            trusted = self._look()
            self._note("end", at=at if trusted else None)

    def _look(self) -> bool:
        at = time.monotonic()
        if self._trusted and not self._lease.held:
            self._trusted = False
            self._note("trust", at=self._seen)
            self._note("lost", why=self._lease.why_ended)
        elif self._trusted:
            self._seen = at
            if at >= self._noted + NOTED:
                self._noted = at
                self._note("trust", at=at)
        return self._trusted

    def _note(self, kind: str, *, at: float | None = None, **more: object) -> None:
        for hold in self._names.values():
            self._history.add("hold", hold, kind, at=at, **more)
