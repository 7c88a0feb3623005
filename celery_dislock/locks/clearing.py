"""End what owners that are done may still hold.

The server did not answer a release, or an exception interrupted an attempt to take a lock.  The
leases and places in line of such owners are released in batches.  Otherwise a process that hangs
after the body, in a result backend that is away, would keep its lock: the worker's main process
renews it.

At the end of a process, and of an event loop, what waits is sent before: nobody would do so later.
"""

from __future__ import annotations

import time
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from celery_dislock.clock import FOREVER
from celery_dislock.exceptions import DamagedLockError, StoreError
from celery_dislock.locks.loop import WITHIN_MOST

if TYPE_CHECKING:
    from collections.abc import Sequence

    from celery_dislock.locks.loop import Loop
    from celery_dislock.servers.requests import LateRelease
    from celery_dislock.servers.store import Store

BATCH = 500  # releases in one round trip
RETRY_EVERY = 1.0  # seconds
FLUSH_WITHIN = 1.0  # most seconds for which the end of a process or an event loop is held up
FLUSH_POLL = 0.005  # seconds
CLEAR_FOR = 90.0  # seconds of retries to release an interrupted attempt; its place expires by then


class Waiting(NamedTuple):
    """A release that waits for the server."""

    release: LateRelease
    until: float  # monotonic time after which the release is not retried


class Clearing:
    """
    The job that releases what could not be released.

    Args:
        loop: The loop that runs it.
        store: Sends the releases.
    """

    def __init__(self, loop: Loop, store: Store) -> None:
        self._loop = loop
        self._store = store
        self._waiting: dict[str, Waiting] = {}  # by owner
        self._again_at = 0.0

    def __len__(self) -> int:
        """Return the number of owners that wait."""
        return len(self._waiting)

    def clear(self, release: LateRelease, *, timeout: float = 0.0) -> None:
        """
        Release soon the leases and places in line of an owner that is done; does not block.

        The release is retried until the server answers or :meth:`cleared` is called.  Leases and
        places end by themselves, so it is retried for *timeout* or ``CLEAR_FOR`` seconds at most; a
        ticket does not.  An owner that is done must not ask for a lock again.

        Args:
            release: The release.
            timeout: Seconds after which its leases have ended by themselves.
        """
        now = self._loop.clock()
        if not self._waiting:
            self._again_at = now + RETRY_EVERY
        until = FOREVER if release.ending.ticket else now + max(CLEAR_FOR, timeout)
        self._waiting[release.owner] = Waiting(release, until)
        self._loop.wake(self._again_at)

    def cleared(self, owner: str) -> None:
        """Forget an owner that no longer holds or waits for a lock."""
        self._waiting.pop(owner, None)

    def hurry(self) -> None:
        """Send at once what waits."""
        if self._waiting:
            self._again_at = self._loop.clock()
            self._loop.wake(self._again_at)

    def flush(self, within: float = FLUSH_WITHIN) -> None:
        """Have what waits sent at once; blocks until it was, for *within* seconds at most."""
        until = time.monotonic() + within
        with suppress(RuntimeError):  # no thread can be started any more
            self.hurry()
        while self._waiting and time.monotonic() < until:
            time.sleep(FLUSH_POLL)

    def due_at(self) -> float:
        """Return the time of the next try."""
        return self._again_at if self._waiting else FOREVER

    def run(self, now: float) -> None:
        """Send one batch of releases."""
        self._again_at = now + RETRY_EVERY
        waiting = self._waiting.copy()
        batch = list(islice(waiting.items(), BATCH))
        within = WITHIN_MOST / 2
        releases = [one.release for _, one in batch]
        answer = self._loop.ask(
            "releasing leases", within, lambda: self._store.clear(releases, within=within)
        )
        errors: Sequence[StoreError | None]
        errors = [answer] * len(batch) if isinstance(answer, StoreError) else answer
        now = self._loop.clock()
        for (owner, one), error in zip(batch, errors, strict=True):
            unanswered = error is not None and not isinstance(error, DamagedLockError)
            if self._waiting.pop(owner, None) is not None and unanswered and now <= one.until:
                self._waiting[owner] = one  # behind the others
        if len(waiting) > len(batch) and not any(errors):
            self.hurry()
