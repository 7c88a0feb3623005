"""Count what this process does with locks, and add the counts up on the lock server.

The children of a prefork worker are processes of their own, which come and go.  A program that asks
one of them sees only its counts.  So the counts of all processes are added up in Redis, by worker,
and a reader of the metrics finds them there; see :mod:`celery_dislock.operating.web.metrics`.

Counting must cost nothing that a task could notice.  What happens is appended to a queue in memory,
which needs no mutex and may be interrupted by a signal handler at any instruction.  Every few
seconds the watchdog's loop adds the queue up, and sends the sums in one round trip.  If nothing has
happened, it sleeps on.

Sums that the server has not confirmed are sent again.  If only its reply was lost, they count
twice.  They never count more often: after a failure a call without counts is sent first, and the
sums follow when that is answered.  A server that hung would otherwise find the sums in its sockets
many times.  What is left is sent at the end of the process.  If the process is killed, the counts
of its last seconds are lost.

What is counted is also recorded by instruments of OpenTelemetry's metrics API, if the application
uses it.  This package never imports it.

Counts are kept by the names of task and worker.  The number of both is bounded.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import Counter, deque
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any

from celery_dislock.clock import FOREVER, monotonic
from celery_dislock.exceptions import StoreError
from celery_dislock.locks.loop import mutex
from celery_dislock.operating.metrics import BUCKETS, COUNTED, MICROSECONDS, PARTS, SUM
from celery_dislock.scripts import milliseconds
from celery_dislock.scripts.names import counts_of, index_of_counts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Counted = tuple[str, str, str, str, float]  # what, outcome, task, worker, number or seconds
    Call = tuple[Any, ...]
    Send = Callable[[list[Call]], list[Any]]  # runs COUNT for each call; returns replies or errors

EVERY = 5.0  # seconds between two batches
COUNTS_KEPT = 3 * 86400.0  # seconds for which a worker's counts are kept after its last batch
WORKERS_MOST = 1000  # on the lock server; those that counted last
FIELDS_MOST = 10_000  # of one worker on the lock server
TASKS_MOST = 500  # names of tasks that a process counts by; the others are counted as OTHER
LABEL_MOST = 200  # characters of a label
EVENTS_MOST = 200_000  # that are not added up yet; the oldest are dropped
OTHER = "other"
SPOKEN = "celery_dislock."  # before all names that OpenTelemetry gets
UNSET = ("Proxy", "NoOp")  # how the meter provider's name begins if the application has set none


def label(name: str, known: set[str]) -> str:
    """Return the value of a label, of limited length; OTHER if there are too many known ones."""
    name = name[:LABEL_MOST]
    if len(known) < TASKS_MOST:
        known.add(name)
    return name if name in known else OTHER


class Instruments:
    """
    The instruments of OpenTelemetry's metrics API.

    Args:
        meter: OpenTelemetry's meter.
    """

    def __init__(self, meter: Any) -> None:
        self._record: dict[str, Callable[..., None]] = {}
        for word, metric in COUNTED.items():
            about = {"name": SPOKEN + word, "description": metric.meaning}
            if metric.kind == "histogram":
                self._record[word] = meter.create_histogram(unit="s", **about).record
            else:
                self._record[word] = meter.create_counter(**about).add
        leases = meter.create_up_down_counter(
            f"{SPOKEN}leases", description="Leases that this process holds"
        )
        self._lease = leases.add

    def record(self, what: str, outcome: str, task: str, worker: str, value: float) -> None:
        """Record what was counted."""
        about = {"task": task, "worker": worker}
        if what == "acquisitions":
            self._lease(1, about)
        elif what == "held":
            self._lease(-1, about)
        if outcome:
            about["outcome"] = outcome
        self._record[what](value, about)


_made: list[Instruments] = []


def instruments() -> Instruments | None:
    """Return the instruments; None in a process that does not use OpenTelemetry's metrics."""
    metrics: Any = sys.modules.get("opentelemetry.metrics")
    if metrics is None:
        return None
    if not _made:
        get_provider = getattr(metrics, "get_meter_provider", None)  # missing during an import
        provider = get_provider() if get_provider is not None else None
        # redis-py imports the API wherever it is installed; that alone means nothing.
        if provider is None or type(provider).__name__.lstrip("_").startswith(UNSET):
            return None
        _made.append(Instruments(provider.get_meter("celery_dislock")))
    return _made[0]


class Counters:
    """
    Counts what happens to locks in one process.

    Every method but :meth:`flush` returns at once.  All are safe to call from many threads or
    greenlets.

    Args:
        prefix: Prefix of the names in Redis.
        wake: Called when something is to be flushed within EVERY seconds.

    Attributes:
        due_at: Time of the next flush.
        error: Why the last flush could not send everything; None: it has.
    """

    def __init__(self, prefix: str, wake: Callable[[], None]) -> None:
        self.due_at = FOREVER
        self.error: StoreError | None = None
        self._prefix = prefix
        self._wake = wake
        self._events: deque[Counted] = deque(maxlen=EVENTS_MOST)
        self._instruments: Instruments | None = None
        self._mutex = mutex()  # of a flush
        self._tasks: set[str] = set()
        self._sums: dict[str, Counter[str]] = {}  # by worker and by field, not confirmed yet

    def add(
        self, what: str, holder: Mapping[str, Any], outcome: str = "", value: float = 1
    ) -> None:
        """
        Count something.

        Args:
            what: The word of a metric.
            holder: Who holds or wants the lock; its task and worker are counted by.
            outcome: How it went; a word.
            value: The number of times; of a histogram, seconds.
        """
        counted = (what, outcome, holder.get("task") or "", holder.get("worker") or "", value)
        self._events.append(counted)
        if self.due_at == FOREVER:
            self.due_at = monotonic() + EVERY
            self._instruments = instruments()
            self._wake()
        if self._instruments is not None:
            self._instruments.record(*counted)

    def flush(self, send: Send, *, patience: float = 0.0) -> None:
        """
        Add up what was counted, and send it; if something is left, set ``due_at``.

        Args:
            send: Sends the counts.
            patience: Seconds to wait for another thread that flushes; it sends what is there.
        """
        if not self._mutex.acquire(timeout=patience):
            self.due_at = monotonic() + EVERY
            return
        try:
            self.due_at = FOREVER  # before the queue is read: what comes later asks for a flush
            with suppress(IndexError):
                while True:
                    self._add_up(*self._events.popleft())
            if self._sums and self.error is not None:
                self._try(send, {worker: Counter() for worker in list(self._sums)[:1]})
            if self._sums and self.error is None:
                for worker in self._try(send, self._sums):
                    del self._sums[worker]
            if self._sums:
                self.due_at = monotonic() + EVERY
        finally:
            self._mutex.release()

    def _try(self, send: Send, sums: Mapping[str, Mapping[str, int]]) -> list[str]:
        """Send sums, and return the workers whose sums the server has confirmed."""
        index = index_of_counts(self._prefix)
        bounds = (milliseconds(COUNTS_KEPT), WORKERS_MOST, FIELDS_MOST)
        calls: list[Call] = [
            (index, counts_of(self._prefix, worker), *bounds, *chain.from_iterable(of.items()))
            for worker, of in sums.items()
        ]
        try:
            replies = send(calls)
        except StoreError as exc:
            replies = [exc] * len(calls)
        self.error = next((reply for reply in replies if isinstance(reply, StoreError)), None)
        done = zip(list(sums), replies, strict=True)
        return [worker for worker, reply in done if not isinstance(reply, StoreError)]

    def _add_up(self, what: str, word: str, task: str, worker: str, value: float) -> None:
        task = label(task, self._tasks)
        sums = self._sums.setdefault(worker[:LABEL_MOST], Counter())
        if COUNTED[what].kind == "histogram":
            seconds = max(value, 0.0)
            if micros := round(seconds * MICROSECONDS):
                sums[f"{what} {SUM} {task}"] += micros
            word, value = PARTS[bisect_left(BUCKETS, seconds)], 1
        sums[f"{what} {word or '-'} {task}"] += int(value)
