"""What was read from the lock server, for all who look at the page.

However many pages are open, the lock server is read once in a while, and no more often the longer
that takes.  While it is away, the last that was read is shown, with its age.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from celery_dislock.exceptions import DamagedLockError, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

FRESH = 3.0  # seconds for which what was read is shown without asking again
SHARE = 4  # of the time at most one part in so many is spent on reading
AWAY = (2.0, 30.0)  # seconds between two questions to a server that is away; doubled from the first

T = TypeVar("T")


@dataclass(frozen=True)
class Reading(Generic[T]):
    """
    What was read.

    Attributes:
        value: What was read.
        age: Seconds since then.
        away: Why the lock server did not answer since; None: it did.
    """

    value: T
    age: float
    away: StoreError | None


class Outage:
    """
    A lock server that does not answer, as all readers of it see it.

    Attributes:
        error: Why it did not answer; None: it did.
    """

    def __init__(self) -> None:
        self.error: StoreError | None = None
        self._until = 0.0
        self._pause = AWAY[0]

    def lasts(self, now: float) -> bool:
        """Tell whether it is too early to ask the server again."""
        return self.error is not None and now < self._until

    def go_on(self, error: StoreError, now: float) -> None:
        """Note that the server did not answer."""
        self.error = error
        self._until = now + self._pause
        self._pause = min(self._pause * 2, AWAY[1])

    def end(self) -> None:
        """Note that the server answered."""
        self.error = None
        self._pause = AWAY[0]


class Shared(Generic[T]):
    """
    One thing that is read for all who ask.  Thread-safe.

    Args:
        read: Reads it; blocks.
        outage: Of the server that is read; several may share it, so that not each of them waits for
            a server that is away.
        fresh: For how many seconds the reading is shown at least.
        quick: Seconds within which a reading costs so little that the next may follow at once.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        read: Callable[[], T],
        outage: Outage,
        *,
        fresh: float = FRESH,
        quick: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._outage = outage
        self._fresh = fresh
        self._quick = quick
        self._clock = clock
        self._reading = threading.Lock()
        self._known: tuple[T, float] | None = None  # and when
        self._due = float("-inf")

    def get(self) -> Reading[T]:
        """
        Return what was read last, or read it.

        Blocks for a reading by this caller.  Blocks for one by another caller only if nothing has
        been read yet.

        Raises:
            DamagedLockError: What was to be read cannot be read; the server answered.
            StoreError: The server did not answer, and nothing has been read yet.
        """
        while True:
            if self._is_due() and self._reading.acquire(blocking=self._known is None):
                try:
                    if self._is_due():  # nobody has read while this caller waited
                        self._read_again()
                finally:
                    self._reading.release()
            known, away = self._known, self._outage.error
            if known is not None:
                return Reading(known[0], self._clock() - known[1], away)
            if away is not None:
                raise away.with_traceback(None)
            # Another reader has just ended the outage.

    def forget(self) -> None:
        """Read again when somebody asks next: something was changed."""
        self._due = float("-inf")

    def _is_due(self) -> bool:
        now = self._clock()
        return now >= self._due and not self._outage.lasts(now)

    def _read_again(self) -> None:
        began = self._clock()
        try:
            value = self._read()
        except DamagedLockError:
            self._outage.end()
            raise
        except StoreError as exc:
            self._outage.go_on(exc, self._clock())
            return
        now = self._clock()
        # The value was true when the reading began, at the earliest.
        self._known = value, began
        took = now - began
        self._due = now + (max(self._fresh, SHARE * took) if took >= self._quick else 0.0)
        self._outage.end()
