"""Read the metrics of all workers from the lock server.

Counters and histograms are what the processes have added up there; see
:mod:`celery_dislock.operating.counting`.  Gauges are read from the locks themselves when somebody
asks, so they are right whatever has become of the processes.

A counter must not go down, or a monitoring system takes the whole of it for new.  After a failover
the server may have lost the last additions, and of several servers one that was away has missed
some.  So a reader keeps the highest value that it has seen of each counter, until the counts of
that worker are less than half of it: then they have begun anew.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from itertools import islice
from typing import TYPE_CHECKING, Any

from celery_dislock.exceptions import StoreError
from celery_dislock.operating.counting import LABEL_MOST, OTHER, TASKS_MOST
from celery_dislock.operating.metrics import COUNTED, METRICS, OUTCOME, PARTS, STATE
from celery_dislock.scripts import COUNTS
from celery_dislock.scripts.names import counts_of, index_of_counts
from celery_dislock.servers.connections import SOCKET_TIMEOUT
from celery_dislock.servers.overview import PLACES, Overview
from celery_dislock.servers.records import text
from celery_dislock.words import plain

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from celery_dislock.locks.runtime import Process, Runtime
    from celery_dislock.operating.metrics import Labels
    from celery_dislock.servers.server import Server
    from celery_dislock.servers.view import LockState

TIMEOUT = 1.0  # seconds for a reply; a command is sent three times at most
TOGETHER = 20  # workers whose counts are read in one round trip, by a script each
PAGES_MOST = 500  # of a hundred locks, that are looked at for the gauges
DIGITS_MOST = 18  # of a count
GAUGES = [(metric, metric.of) for metric in METRICS if metric.of is not None]


class Reading:
    """
    The metrics at one moment.

    Attributes:
        up: Whether the lock server answered everything.
        values: By the metric's name and the values of its labels: a number, or of a histogram one
            for each of :data:`celery_dislock.operating.metrics.PARTS`.
    """

    def __init__(self) -> None:
        self.up = False
        self.values: dict[str, dict[Labels, Any]] = defaultdict(dict)


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
                self._marks = {
                    worker: _not_less(fields, self._marks.get(worker, {}))
                    for worker, fields in self._counts(server)
                    if fields
                }
                _add_counted(reading, self._marks)
                self._add_gauges(reading, server)
                reading.up = True
            except StoreError:
                pass
            reading.values["celery_dislock_server_up"][()] = float(reading.up)
            return reading

    @property
    def _server(self) -> Server:
        """A lock server of this reader's own: its batches are for one thread."""
        if self._process is None or self._pid != os.getpid():
            self._pid = os.getpid()
            self._process = self._runtime.new_process()
            self._store = self._process.store_within(TIMEOUT)
        return self._store.lock_server

    def _counts(self, server: Server) -> Iterator[tuple[str, dict[str, int]]]:
        """Read what each worker has counted, by field."""
        prefix = self._runtime.settings.dislock_prefix
        index = index_of_counts(prefix)
        names = list(map(text, server.run(COUNTS, [index])))
        for first in range(0, len(names), TOGETHER):
            some = names[first : first + TOGETHER]
            calls = [(index, name) for name in some]
            replies = server.run_many(COUNTS, calls, within=SOCKET_TIMEOUT)
            for name, reply in zip(some, replies, strict=True):
                if isinstance(reply, StoreError):
                    raise reply
                yield name.removeprefix(counts_of(prefix, "")), dict(_fields(reply[0]))

    def _add_gauges(self, reading: Reading, server: Server) -> None:
        overview = Overview(server, self._runtime.settings.dislock_prefix)
        failed: list[StoreError] = []
        found: dict[str, dict[Labels, float]] = {metric.name: {} for metric, _ in GAUGES}
        names: set[str] = set()
        pages = 0
        for page in islice(overview.names(failed=failed), PAGES_MOST):
            pages += 1
            for lock in _with_lines(overview, page):
                for metric, of in GAUGES:
                    known, is_ours = found[metric.name], metric.labels == (STATE,)
                    for given, number in of(lock):
                        labels = tuple(str(x) if is_ours else _bounded(x, names) for x in given)
                        before = known.get(labels)
                        known[labels] = (
                            number if before is None else metric.together(before, number)
                        )
        if failed and server.kind != "quorum":  # of several servers, the others have the same locks
            raise failed[0]
        reading.values.update(found)
        if pages == PAGES_MOST:
            reading.values["celery_dislock_locks_cut"][()] = 1.0


def _add_counted(reading: Reading, counts: Mapping[str, Mapping[str, int]]) -> None:
    for worker, fields in counts.items():
        for field, number in fields.items():
            what, _, rest = field.partition(" ")
            word, _, task = rest.partition(" ")
            metric = COUNTED.get(what)
            if metric is None:  # of another version
                continue
            of_metric = reading.values[metric.name]
            if metric.kind == "histogram":
                parts = of_metric.setdefault((task, worker), [0] * len(PARTS))
                if word in PARTS:
                    parts[PARTS.index(word)] = number
            else:
                of_metric[(task, worker, word) if OUTCOME in metric.labels else (task, worker)] = (
                    number
                )


def _bounded(given: str | None, names: set[str]) -> str:
    """Return the value of a label that comes from a record in Redis; their number is bounded."""
    name = plain((given or "")[:LABEL_MOST])
    if len(names) < TASKS_MOST:
        names.add(name)
    return name if name in names else OTHER


def _with_lines(overview: Overview, names: Sequence[str]) -> Iterator[LockState]:
    """Look at locks, and again at those that have a line, of which the first places are wanted."""
    locks = [one for one in overview.look(names) if not isinstance(one, StoreError)]
    yield from (one for one in locks if not one.waiting)
    lined = [one for one in locks if one.waiting]
    again = overview.look([one.name for one in lined], most=PLACES) if lined else []
    for before, lock in zip(lined, again, strict=True):
        yield before if isinstance(lock, StoreError) else lock


def _fields(flat: Sequence[bytes]) -> Iterator[tuple[str, int]]:
    for field, number in zip(*[iter(flat)] * 2, strict=True):
        if number.isdigit() and len(number) <= DIGITS_MOST:
            yield text(field), int(number)


def _not_less(now: Mapping[str, int], before: Mapping[str, int]) -> Mapping[str, int]:
    """Return the counts, none of them less than before, unless the worker's counts began anew."""
    if 2 * sum(now.values()) < sum(before.values()):
        return now
    return {**now, **{field: max(number, now.get(field, 0)) for field, number in before.items()}}
