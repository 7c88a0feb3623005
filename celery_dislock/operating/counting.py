"""Count what this process does with locks, and add the counts up on the lock server.

The children of a prefork worker are processes of their own, which come and go.  A program that asks
one of them sees only its counts.  So the counts of all processes are added up in Redis, by worker,
and whoever asks for metrics reads them there; see :mod:`celery_dislock.operating.metrics`.

Counting must cost nothing that a task could notice.  What happens is appended to a queue in memory,
which needs no mutex and may be interrupted by a signal handler at any instruction.  Every few
seconds the watchdog's loop adds the queue up, and sends the sums in one round trip.  If nothing has
happened, it sleeps on.

A batch of sums is numbered, and stays as it is until the server has confirmed it.  The server keeps
the last number of each process, so a batch that is sent again counts once.  While the server is
away, the batch waits, and new counts are added up beside it.  At the end of the process everything
is sent that is left.  A process that is killed takes the counts of its last seconds along.

What is counted is bounded: by name of a task, of which a process has few, and by the worker's name.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from bisect import bisect_left
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

from celery_dislock.exceptions import StoreError
from celery_dislock.locks.native import mutex
from celery_dislock.locks.observer import FOREVER, nothing
from celery_dislock.operating.tracing import instruments
from celery_dislock.scripts import COUNT
from celery_dislock.scripts.names import counted_by, counts_of, index_of_counts
from celery_dislock.servers.replies import milliseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from celery_dislock.operating.tracing import Instruments
    from celery_dislock.servers.server import Server

    Field = tuple[str, str, str]  # what, outcome or bucket, task

EVERY = 5.0  # seconds between two batches
KEPT = 3 * 86400.0  # seconds for which a worker's counts are kept after its last batch
SEEN = 3600.0  # seconds for which the number of a process's last batch is kept
WORKERS_MOST = 1000  # on the lock server; those that counted last
FIELDS_MOST = 10_000  # of one worker on the lock server
TASKS_MOST = 500  # names of tasks that a process counts by; the others are counted as OTHER
LABEL_MOST = 200  # characters of a label
EVENTS_MOST = 200_000  # that are not added up yet; the oldest are dropped
FINISH_WITHIN = 2.0  # seconds to wait for a batch on its way, at the end of a process
WAKE_AGAIN = 1000  # events
OTHER = "other"

# Counters, by the name of their field: acquisitions, conflicts, and so on.
MESSAGE, ACQUIRED, CONFLICT, RENEWED, LOST, CAPPED, UNAVAILABLE = (
    "message",
    "acquired",
    "conflict",
    "renewed",
    "lost",
    "capped",
    "unavailable",
)
# Histograms; the field of a bucket ends in its limit, and two more in SUM and INFINITE.
WAIT, HELD = "wait", "held"
BUCKETS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 3600.0)  # seconds
LIMITS = tuple(f"{limit:g}" for limit in BUCKETS)
INFINITE = "inf"
WORDS = (*LIMITS, INFINITE)
HISTOGRAMS = {WAIT, HELD}
SUM = "sum"  # in microseconds: whole numbers add up exactly
MICROSECONDS = 1e6

logger = logging.getLogger("celery_dislock")


class Event(NamedTuple):
    """Something that was counted: *value* is a number of times, or seconds of a histogram."""

    what: str
    outcome: str
    task: str
    worker: str
    value: float


class Sums:
    """
    What a process has counted for one worker.

    Attributes:
        counts: What the server was not sent, by field.
        number: Number of the last batch.
        batch: The last batch, as long as the server has not confirmed it.
    """

    __slots__ = ("batch", "counts", "number")

    def __init__(self) -> None:
        self.counts: dict[Field, int] = {}
        self.number = 0
        self.batch: dict[Field, int] | None = None

    def next_batch(self) -> dict[Field, int] | None:
        """Return the batch to send; None if there is nothing to send."""
        if self.batch is None and self.counts:
            self.batch, self.counts = self.counts, {}
            self.number += 1
        return self.batch


class Counters:
    """
    Counts what happens to locks in one process.

    Every method but :meth:`flush` and :meth:`finish` returns at once.  All are safe to call from
    many threads or greenlets.

    Args:
        prefix: Prefix of the names in Redis.
        process: Name of this process; no two processes share it.
        server: Returns the lock server that is asked at the end of the process.
        clock: Returns monotonic seconds.

    Attributes:
        wake: Called when something is to be flushed within EVERY seconds; set by the watchdog.
        due_at: Time of the next flush.
        error: Why the last flush could not send everything; None: it has.
    """

    def __init__(
        self,
        prefix: str,
        process: str,
        server: Callable[[], Server],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.due_at = FOREVER
        self._clock = clock
        self.wake: Callable[[], None] = nothing
        self.error: StoreError | None = None
        self._prefix = prefix
        self._process = process
        self._server = server
        self._pid = os.getpid()
        self._events: deque[Event] = deque(maxlen=EVENTS_MOST)
        self._expected = False  # whether a flush will come
        self._instruments: Instruments | None = None
        self._mutex = mutex()  # of a flush
        self._tasks: set[str] = set()
        self._sums: dict[str, Sums] = {}
        _living.add(self)

    def add(
        self,
        what: str,
        holder: Mapping[str, Any],
        outcome: str = "",
        value: float = 1,
    ) -> None:
        """
        Count something.

        Args:
            what: One of the names in this module.
            holder: Who holds or wants the lock; its task and worker are counted by.
            outcome: How it went; a word.
            value: The number of times; of a histogram, seconds.
        """
        event = Event(what, outcome, holder.get("task") or "", holder.get("worker") or "", value)
        self._events.append(event)
        # Now and then also if a flush is expected: a signal handler may have come in between here.
        if not self._expected or len(self._events) % WAKE_AGAIN == 0:
            self.due_at = min(self.due_at, self._clock() + EVERY)
            self.wake()
            self._expected = True
            self._instruments = instruments()
        if self._instruments is not None:
            self._instruments.record(*event)

    def flush(self, send: Callable[[list[tuple[str | bytes | int, ...]]], list[Any]]) -> None:
        """
        Add up what was counted, and send it; if something is left, set ``due_at``.

        Args:
            send: Runs COUNT for each of these calls; returns the replies or errors.
        """
        if not self._mutex.acquire(blocking=False):  # another thread does so, at the process's end
            self.due_at = self._clock() + EVERY
            return
        try:
            self.due_at = FOREVER
            self._expected = False  # before the queue is read: what comes later asks for a flush
            self._add_up()
            sent = [(worker, sums) for worker, sums in self._sums.items() if sums.next_batch()]
            if not sent:
                return
            try:
                replies = send([self._call(worker, sums) for worker, sums in sent])
            except StoreError as exc:
                replies = [exc] * len(sent)
            left, self.error = False, None
            for (_, sums), reply in zip(sent, replies, strict=True):
                if isinstance(reply, StoreError):
                    left, self.error = True, reply
                else:
                    sums.batch = None
                    left = left or bool(sums.counts)
            self._expected = self._expected or left
            if left:
                self.due_at = min(self.due_at, self._clock() + EVERY)
        finally:
            self._mutex.release()

    def finish(self) -> None:
        """Send what is left, at the end of the process; blocks for a round trip or two."""
        if self._pid != os.getpid() or not (self._events or self._unsent):
            return
        if not self._mutex.acquire(timeout=FINISH_WITHIN):
            return
        self._mutex.release()
        index = index_of_counts(self._prefix)

        def send(calls: list[tuple[Any, ...]]) -> list[Any]:
            server = self._server()
            return [server.run(COUNT, [index], *arguments) for _, *arguments in calls]

        self.flush(send)
        if not any(sums.batch for sums in self._sums.values()):  # that server answers
            self.flush(send)  # what came after a batch that had failed before

    @property
    def _unsent(self) -> bool:
        return any(sums.batch or sums.counts for sums in self._sums.values())

    def _add_up(self) -> None:
        with suppress(IndexError):
            while True:
                self._add(self._events.popleft())

    def _add(self, event: Event) -> None:
        what, word, task, worker, value = event
        if task not in self._tasks:
            task = self._known(task)
        sums = self._sums.get(worker)
        if sums is None:
            worker = worker[:LABEL_MOST]
            sums = self._sums.setdefault(worker, Sums())
        counts = sums.counts
        if what in HISTOGRAMS:
            seconds = max(value, 0.0)
            field = (what, SUM, task)
            counts[field] = counts.get(field, 0) + round(seconds * MICROSECONDS)
            word, value = WORDS[bisect_left(BUCKETS, seconds)], 1
        field = (what, word, task)
        counts[field] = counts.get(field, 0) + int(value)

    def _known(self, task: str) -> str:
        task = task[:LABEL_MOST]
        if task not in self._tasks and len(self._tasks) >= TASKS_MOST:
            return OTHER
        self._tasks.add(task)
        return task

    def _call(self, worker: str, sums: Sums) -> tuple[str | bytes | int, ...]:
        prefix = self._prefix
        batch = sums.batch or {}
        return (
            index_of_counts(prefix),
            sums.number,
            counted_by(prefix, worker, self._process),
            counts_of(prefix, worker),
            *(milliseconds(KEPT), milliseconds(SEEN), WORKERS_MOST, FIELDS_MOST),
            *_fields(batch),
        )


def _fields(batch: Mapping[Field, int]) -> Iterator[str | int]:
    """List the fields as the server has them, each with its amount; a task may have any name."""
    for (what, word, task), amount in batch.items():
        if amount:
            yield f"{what} {word or '-'} {task}"
            yield amount


_living: WeakSet[Counters] = WeakSet()


def finish_all(**_kwargs: Any) -> None:
    """Send what the processes of all apps have left to send; a handler of Celery's signals, too."""
    for counters in list(_living):
        try:
            counters.finish()
        except Exception as exc:  # noqa: BLE001 -- the process ends; its counts are not worth more
            logger.debug("Counts of locks are lost at the end of the process: %r", exc)


atexit.register(finish_all)
