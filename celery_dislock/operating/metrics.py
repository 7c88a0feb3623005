"""Read the metrics of all workers from the lock server.

Counters and histograms are what the processes have added up there; see
:mod:`celery_dislock.operating.counting`.  Gauges are read from the locks themselves when somebody
asks, so they are right whatever has become of the processes.

A counter must not go down, or a monitoring system takes the whole of it for new.  After a failover
the server may have lost the last additions, and of several servers one that was away has missed
some.  So a reader keeps the highest value that it has seen of each counter, until the counter
begins anew.
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter, defaultdict
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from celery_dislock.exceptions import StoreError
from celery_dislock.operating.counting import (
    ACQUIRED,
    BUCKETS,
    CAPPED,
    CONFLICT,
    HELD,
    INFINITE,
    LABEL_MOST,
    LIMITS,
    LOST,
    MESSAGE,
    MICROSECONDS,
    OTHER,
    RENEWED,
    SUM,
    UNAVAILABLE,
    WAIT,
)
from celery_dislock.scripts import COUNTS, TALLY
from celery_dislock.scripts.names import counts_of, index_of_counts
from celery_dislock.servers.overview import Overview
from celery_dislock.servers.records import text
from celery_dislock.servers.server import SOCKET_TIMEOUT
from celery_dislock.words import LONGEST, plain

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from celery_dislock.locks.runtime import Process, Runtime
    from celery_dislock.servers.server import Server
    from celery_dislock.servers.view import LockState

TIMEOUT = 1.0  # seconds for a reply; a command is sent three times at most
TOGETHER = 20  # workers whose counts are read in one round trip, by a script each
PLACES = 500  # of a line that are counted in one script: about 1 ms of work for the server
PLACES_MOST = 10_000  # of a line that are counted; the others are taken to be of the same tasks
PAGES_MOST = 500  # of a hundred locks, that are looked at for the gauges
TASKS_MOST = 500  # names of tasks that gauges have; the others are OTHER
DIGITS_MOST = 18  # of a count
SINCE = "since"  # of count.lua

TASK, WORKER, OUTCOME, STATE = "task", "worker", "outcome", "state"


class Metric(NamedTuple):
    """
    A metric that is exported.

    Attributes:
        name: Its name, with the ending of a counter.
        kind: "counter", "histogram" or "gauge".
        labels: Names of its labels.
        meaning: What it says, in a sentence.
        counted: How it is called on the lock server; empty: it is read from the locks.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str
    counted: str = ""


METRICS = (
    Metric(
        "celery_dislock_messages_total",
        "counter",
        (TASK, WORKER, OUTCOME),
        "Messages of tasks that are unique when they are sent: sent, duplicate (not sent), "
        "unreserved (sent, and its key was not reserved), or replaced (told by the worker that got "
        "it).",
        MESSAGE,
    ),
    Metric(
        "celery_dislock_acquisitions_total",
        "counter",
        (TASK, WORKER, OUTCOME),
        "Leases that were granted: at_once, waited (in a worker slot), parked (its turn came), or "
        "put_off (it was sent again before).",
        ACQUIRED,
    ),
    Metric(
        "celery_dislock_conflicts_total",
        "counter",
        (TASK, WORKER, OUTCOME),
        "Deliveries that found their lock held, by what lock_on_conflict made of them; copy: "
        "another delivery of the same task held it; refused: in plain Python.",
        CONFLICT,
    ),
    Metric(
        "celery_dislock_lost_total",
        "counter",
        (TASK, WORKER, OUTCOME),
        "Leases that were lost while their bodies ran: expired (not renewed in time), or gone (the "
        "lock server no longer had them).",
        LOST,
    ),
    Metric(
        "celery_dislock_capped_total",
        "counter",
        (TASK, WORKER),
        "Leases that were renewed max_renew_times, and are renewed no more.",
        CAPPED,
    ),
    Metric(
        "celery_dislock_renewals_total",
        "counter",
        (TASK, WORKER),
        "Renewals of leases by the watchdogs.",
        RENEWED,
    ),
    Metric(
        "celery_dislock_unavailable_total",
        "counter",
        (TASK, WORKER, OUTCOME),
        "Deliveries to which the lock server did not answer, by dislock_on_unavailable.",
        UNAVAILABLE,
    ),
    Metric(
        "celery_dislock_wait_seconds",
        "histogram",
        (TASK, WORKER),
        "Seconds from the first request for a lock until it was granted, in line and put off "
        "included.",
        WAIT,
    ),
    Metric(
        "celery_dislock_held_seconds",
        "histogram",
        (TASK, WORKER),
        "Seconds from the grant of a lock until its release or loss.",
        HELD,
    ),
    Metric(
        "celery_dislock_leases",
        "gauge",
        (TASK, WORKER),
        "Leases that are live now.",
    ),
    Metric(
        "celery_dislock_leases_overdue",
        "gauge",
        (TASK, WORKER),
        "Live leases of which two renewals in a row were missed.",
    ),
    Metric(
        "celery_dislock_parked",
        "gauge",
        (TASK,),
        "Parked tasks that are in line now.",
    ),
    Metric(
        "celery_dislock_parked_oldest_seconds",
        "gauge",
        (TASK,),
        "Seconds since the parked task was parked that has been in line for the longest time, of "
        "the lines whose first parked task is of this task.",
    ),
    Metric(
        "celery_dislock_reservations",
        "gauge",
        (STATE,),
        "Keys that are reserved now for a message that is being sent, waiting or running, or whose "
        "task has ended.",
    ),
    Metric(
        "celery_dislock_reservations_oldest_seconds",
        "gauge",
        (STATE,),
        "Seconds since the oldest of these reservations was made; with ended, since its task has "
        "ended.",
    ),
    Metric(
        "celery_dislock_limits",
        "gauge",
        (STATE,),
        "Keys that an operator has paused or limited now.",
    ),
    Metric(
        "celery_dislock_limits_oldest_seconds",
        "gauge",
        (STATE,),
        "Seconds since the oldest of these was set.",
    ),
    Metric(
        "celery_dislock_limits_waiting",
        "gauge",
        (STATE,),
        "Waiters and parked tasks in the lines of these keys.",
    ),
    Metric(
        "celery_dislock_locks_cut",
        "gauge",
        (),
        "1 if there are 50,000 locks or more: the gauges are of 50,000 of them. Else left out.",
    ),
    Metric(
        "celery_dislock_server_up",
        "gauge",
        (),
        "1 if the lock server answered all that was asked for these metrics; else 0.",
    ),
)

Labels = tuple[str, ...]


class Distribution:
    """
    What a histogram has counted for one set of labels.

    Attributes:
        buckets: Number of observations in each bucket of BUCKETS alone, and beyond the last.
        sum: Sum of the observations in seconds.
    """

    __slots__ = ("buckets", "sum")

    def __init__(self) -> None:
        self.buckets = [0] * (len(BUCKETS) + 1)
        self.sum = 0.0


class Reading:
    """
    The metrics at one moment.

    Attributes:
        up: Whether the lock server answered everything.
        values: Values of counters and gauges, by the metric's name and the values of its labels.
        distributions: The same of histograms.
    """

    def __init__(self) -> None:
        self.up = False
        self.values: dict[str, dict[Labels, float]] = {}
        self.distributions: dict[str, dict[Labels, Distribution]] = {}


class Metrics:
    """
    Reads the metrics of an app's locks.  Thread-safe; one reading at a time.

    Args:
        runtime: What the app's locks share.
    """

    def __init__(self, runtime: Runtime[Any]) -> None:
        self._runtime = runtime
        self._mutex = threading.Lock()
        self._marks: dict[str, Mapping[str, int]] = {}  # highest counts seen, by worker
        self._pid = 0
        self._process: Process | None = None

    def read(self) -> Reading:
        """
        Read all metrics; blocks for some round trips, which grow with the number of locks.

        Never raises a StoreError.  If the server does not answer, the reading has the counters if
        those were read, and no gauges but the one that says so.
        """
        with self._mutex:
            reading = Reading()
            try:
                server = self._server
                self._counted(reading, self.counts(server))
                self._gauges(reading, server)
                reading.up = True
            except StoreError:
                pass
            reading.values["celery_dislock_server_up"] = {(): float(reading.up)}
            return reading

    @property
    def _server(self) -> Server:
        """A lock server of this reader's own: its batches are for one thread."""
        if self._process is None or self._pid != os.getpid():
            self._pid = os.getpid()
            self._process = self._runtime.new_process()
            self._store = self._process.store_within(TIMEOUT)
        return self._store.lock_server

    def close(self) -> None:
        """Close the connections."""
        with self._mutex:
            if self._process is not None and self._pid == os.getpid():
                self._store.close()
                self._process.close()
            self._process = None

    def counts(self, server: Server) -> dict[str, Mapping[str, int]]:
        """
        Return what each worker has counted, by field.

        Raises:
            StoreError: The server did not answer.
        """
        prefix = self._runtime.settings.dislock_prefix
        index = index_of_counts(prefix)
        names = list(map(text, server.run(COUNTS, [index])))
        found: dict[str, Mapping[str, int]] = {}
        for first in range(0, len(names), TOGETHER):
            some = names[first : first + TOGETHER]
            calls = [(index, name) for name in some]
            replies = server.run_many(COUNTS, calls, within=SOCKET_TIMEOUT)
            for name, reply in zip(some, replies, strict=True):
                if isinstance(reply, StoreError):
                    raise reply
                (flat,) = reply
                worker = name.removeprefix(counts_of(prefix, ""))
                fields = dict(_fields(flat))
                if fields:
                    found[worker] = _not_less(fields, self._marks.get(worker, {}))
        self._marks = found
        return found

    def _counted(self, reading: Reading, counts: Mapping[str, Mapping[str, int]]) -> None:
        by_field = {metric.counted: metric for metric in METRICS if metric.counted}
        for worker, fields in counts.items():
            for field, number in fields.items():
                what, _, rest = field.partition(" ")
                word, _, task = rest.partition(" ")
                metric = by_field.get(what)
                if metric is None:  # "since", or of a newer version
                    continue
                if metric.kind == "histogram":
                    self._observed(reading, metric, (task, worker), word, number)
                    continue
                labels = (task, worker, word) if OUTCOME in metric.labels else (task, worker)
                reading.values.setdefault(metric.name, {})[labels] = number

    @staticmethod
    def _observed(reading: Reading, metric: Metric, labels: Labels, word: str, number: int) -> None:
        by_labels = reading.distributions.setdefault(metric.name, {})
        distribution = by_labels.setdefault(labels, Distribution())
        if word == SUM:
            distribution.sum = number / MICROSECONDS
        elif word in LIMITS:
            distribution.buckets[LIMITS.index(word)] += number
        elif word == INFINITE:
            distribution.buckets[-1] += number

    def _gauges(self, reading: Reading, server: Server) -> None:
        names = _Names()
        leases: Counter[Labels] = Counter()
        overdue: Counter[Labels] = Counter()
        parked: Counter[Labels] = Counter()
        oldest: dict[Labels, float] = defaultdict(float)
        reserved: Counter[Labels] = Counter()
        since: dict[Labels, float] = defaultdict(float)
        limits: Counter[Labels] = Counter()
        limited_for: dict[Labels, float] = defaultdict(float)
        behind: Counter[Labels] = Counter()
        overview = Overview(server, self._runtime.settings.dislock_prefix)
        failed: list[StoreError] = []
        pages = 0
        for page in islice(overview.names(failed=failed), PAGES_MOST):
            pages += 1
            states = [one for one in overview.look(page) if not isinstance(one, StoreError)]
            for state in states:
                for holder in state.holders:
                    labels = (names.of(holder.task), names.of(holder.worker))
                    leases[labels] += 1
                    overdue[labels] += holder.is_overdue
                if state.reservation is not None:
                    of_state = (state.reservation.state,)
                    reserved[of_state] += 1
                    since[of_state] = max(since[of_state], state.reservation.since)
                if state.limit is not None:
                    of_state = ("paused" if state.is_paused else "limited",)
                    limits[of_state] += 1
                    limited_for[of_state] = max(limited_for[of_state], state.limit_age or 0.0)
                    behind[of_state] += state.waiting
            for line in _lines(server, [state for state in states if state.waiting]):
                for task, number in line.tasks.items():
                    parked[names.of(task),] += number
                if line.tasks:
                    head = (names.of(line.head),)
                    oldest[head] = max(oldest[head], line.oldest)
        if failed and server.kind != "quorum":  # of several servers, the others have the same locks
            raise failed[0]
        reading.values["celery_dislock_leases"] = dict(leases)
        reading.values["celery_dislock_leases_overdue"] = dict(overdue)
        reading.values["celery_dislock_parked"] = dict(parked)
        reading.values["celery_dislock_parked_oldest_seconds"] = dict(oldest)
        reading.values["celery_dislock_reservations"] = dict(reserved)
        reading.values["celery_dislock_reservations_oldest_seconds"] = dict(since)
        reading.values["celery_dislock_locks_cut"] = {(): 1.0} if pages == PAGES_MOST else {}
        reading.values["celery_dislock_limits"] = dict(limits)
        reading.values["celery_dislock_limits_oldest_seconds"] = dict(limited_for)
        reading.values["celery_dislock_limits_waiting"] = dict(behind)


class _Names:
    """Values of labels that come from records in Redis; their number is bounded."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def of(self, name: object) -> str:
        given = "" if name is None else plain(str(name)[:LABEL_MOST])
        if given not in self._known:
            if len(self._known) >= TASKS_MOST:
                return OTHER
            self._known.add(given)
        return given


class _Line(NamedTuple):
    """The parked tasks of one line: how many of each task, and of the first one task and age."""

    tasks: Mapping[str, int]
    head: str
    oldest: float


def _lines(server: Server, locks: Sequence[LockState]) -> Iterator[_Line]:
    """Count the parked tasks in the lines of some locks, in pages."""
    tallies = {lock.name: Counter[str]() for lock in locks}
    heads: dict[str, tuple[str, float]] = {}
    first, left = 0, list(tallies)
    while left and first < PLACES_MOST:
        calls = [(name, first, PLACES) for name in left]
        replies = server.run_many(TALLY, calls, within=SOCKET_TIMEOUT)
        more = []
        for name, reply in zip(left, replies, strict=True):
            if isinstance(reply, StoreError):  # not a line
                continue
            now_us, places, joined_us, *found = reply
            for task, number in zip(*[iter(found)] * 2, strict=True):
                tallies[name][_task_of(task)] += number
            if found and name not in heads:
                heads[name] = (_task_of(found[0]), _seconds(now_us, joined_us))
            if places == PLACES:
                more.append(name)
        first, left = first + PLACES, more
    for lock in locks:
        if lock.name in heads:
            tally = tallies[lock.name]
            if lock.name in left:  # of a line that long, the tasks further back were not looked at
                ((most, _),) = tally.most_common(1)
                tally[most] += max(0, lock.waiting - PLACES_MOST)
            yield _Line(tally, *heads[lock.name])


def _seconds(now_us: bytes, joined_us: bytes) -> float:
    """Return how long ago a task was parked; 0 if the score of its place is no time."""
    seconds = (int(now_us) - float(joined_us)) / 1e6
    return seconds if abs(seconds) < LONGEST else 0.0


def _task_of(written: bytes) -> str:
    """Return the name of a task from the header of its message."""
    name = text(written)
    try:
        return str(json.loads(f'"{name}"'))
    except ValueError:
        return name


def _fields(flat: Sequence[bytes]) -> Iterator[tuple[str, int]]:
    for field, number in zip(*[iter(flat)] * 2, strict=True):
        if number.isdigit() and len(number) <= DIGITS_MOST:
            yield text(field), int(number)


def _not_less(now: dict[str, int], before: Mapping[str, int]) -> Mapping[str, int]:
    """Return the counts, none of them less than before, unless the worker's counts began anew."""
    if not before:
        return now
    began_anew = now.get(SINCE) != before.get(SINCE)
    if began_anew and 2 * _total(now) < _total(before):
        return now
    kept = {field: max(number, now.get(field, 0)) for field, number in before.items()}
    return {**now, **kept, SINCE: now.get(SINCE, 0)}


def _total(counts: Mapping[str, int]) -> int:
    return sum(number for field, number in counts.items() if field != SINCE)
