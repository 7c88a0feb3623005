"""What was read from the lock server, kept for some seconds for all who ask.

However many browsers look, the lock server is read once for all of them.  One caller reads, and the
others get what was read before.  While the lock server does not answer, they get the last that was
read, its age, and why there is nothing newer.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from celery_dislock.exceptions import DamagedLockError, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

FRESH = 3.0  # seconds for which something is shown without reading it again
QUICK = 0.25  # seconds; what took longer to read is kept for longer
SHARE = 4  # times as long as the reading took
KEPT_MOST = 100  # things that are kept; those that were asked for last stay
NEVER = float("-inf")

T = TypeVar("T")


@dataclass(frozen=True)
class CachedValue(Generic[T]):
    """
    Something that was read.

    Attributes:
        value: What was read.
        age: Seconds since then.
        away: Why the lock server did not answer since; None: it did.
    """

    value: T
    age: float
    away: StoreError | None


@dataclass
class _Entry:
    reading: threading.Lock = field(default_factory=threading.Lock)  # one caller reads at a time
    known: tuple[Any, ...] = ()  # the value, once it was read
    began: float = NEVER  # when the reading of what is known began
    tried: float = NEVER  # when the last reading began
    due: float = NEVER  # when to read again
    away: StoreError | None = None


class Cache:
    """
    Keeps what was read from the lock server.  Thread-safe.

    A reading that takes longer than :data:`QUICK` is kept for :data:`SHARE` times as long, so that
    a server with very many locks spends a fifth of its time on it at most.

    Args:
        seconds: For how long something is kept at least.
        clock: Seconds that only grow.
    """

    def __init__(self, seconds: float = FRESH, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._mutex = threading.Lock()
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._forgotten = NEVER

    def get(self, what: Hashable, read: Callable[[], T]) -> CachedValue[T]:
        """
        Return what was read last, or read it; blocks while it is read for the first time.

        Args:
            what: Names the thing.
            read: Reads it; blocks.

        Raises:
            DamagedLockError: The server answered, and what was to be read cannot be read.
            StoreError: The server did not answer, and nothing has been read yet.
        """
        with self._mutex:
            entry = self._entries.setdefault(what, _Entry())
            self._entries.move_to_end(what)
            if len(self._entries) > KEPT_MOST:
                self._entries.popitem(last=False)
        if self._is_due(entry) and entry.reading.acquire(blocking=not entry.known):
            try:
                if self._is_due(entry):  # nobody has read it while this caller waited
                    self._read(entry, read)
            finally:
                entry.reading.release()
        if not entry.known:
            assert entry.away is not None  # noqa: S101 -- a reading ends with one of the two
            raise entry.away.with_traceback(None)
        return CachedValue(entry.known[0], self._clock() - entry.began, entry.away)

    def forget(self) -> None:
        """Read everything again when somebody asks next: a lock was changed."""
        self._forgotten = self._clock()

    def _is_due(self, entry: _Entry) -> bool:
        return self._clock() >= entry.due or entry.tried <= self._forgotten

    def _read(self, entry: _Entry, read: Callable[[], Any]) -> None:
        entry.tried = self._clock()
        try:
            # The value was true when the reading began, at the earliest.
            entry.known, entry.began, entry.away = (read(),), entry.tried, None
        except DamagedLockError:
            raise
        except StoreError as exc:
            entry.away = exc
        now = self._clock()
        took = now - entry.tried
        entry.due = now + max(self._seconds, SHARE * took if took > QUICK else 0.0)
