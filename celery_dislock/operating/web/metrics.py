"""Serve the metrics of an app's locks to Prometheus.

Mount it at ``/metrics`` of any WSGI application, or serve it alone::

    from wsgiref.simple_server import make_server
    from celery_dislock.operating.web.metrics import make_wsgi_app

    make_server("127.0.0.1", 9540, make_wsgi_app(app)).serve_forever()

It reads the lock server, and needs no worker in its process.  If a reading takes long, because
there are very many locks, those who ask meanwhile get the last one.  It answers 200 also if the
lock server is away: ``celery_dislock_server_up`` is 0 then.

Counters and histograms are what the processes have added up on the lock server; see
:mod:`celery_dislock.operating.counting`.  Gauges are read from the locks themselves when somebody
asks, so they are right whatever has become of the processes.

A counter must not go down, or a monitoring system takes the whole of it for new.  After a failover
the server may have lost the last additions, and of several servers one that was away has missed
some.  So a reader keeps the highest value that it has seen of each counter, until the counts of
that worker are less than half of it: then they have begun anew.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any, Protocol

from celery_dislock.exceptions import StoreError
from celery_dislock.operating.checks.troubles import troubles_of
from celery_dislock.operating.counting import label
from celery_dislock.operating.locks import AppLocks, rows
from celery_dislock.operating.metrics import (
    BUCKETS,
    COUNTED,
    IN_TROUBLE,
    IN_TROUBLE_FOR,
    METRICS,
    MICROSECONDS,
    OUTCOME,
    PARTS,
    STATE,
)
from celery_dislock.operating.site import Site
from celery_dislock.operating.web.cache import Cache
from celery_dislock.operating.web.listing import LOCKS_MOST
from celery_dislock.scripts import COUNTS
from celery_dislock.scripts.names import counts_of, index_of_counts
from celery_dislock.servers.overview import PLACES_SHOWN
from celery_dislock.servers.records import decode
from celery_dislock.words import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from celery import Celery

    from celery_dislock.locks.runtime import Runtime
    from celery_dislock.operating.metrics import Labels, Metric
    from celery_dislock.servers.overview import Overview
    from celery_dislock.servers.view import LockState

    # By a metric's name and the values of its labels: a number, or one for each of PARTS.
    Values = dict[str, dict[Labels, Any]]

    class Dislock(Protocol):
        """What is needed of one; it stands above this module."""

        runtime: Runtime[Any]


TIMEOUT = 1.0  # seconds for a reply; a command is sent three times at most
TOGETHER = 20  # workers whose counts are read in one round trip, by a script each
DIGITS_MOST = 18  # of a count
UP = "celery_dislock_server_up"
GAUGES = [(metric, metric.of) for metric in METRICS if metric.of is not None]
NEEDS = "Metrics for Prometheus need prometheus_client: pip install 'celery-dislock[metrics]'"


def make_wsgi_app(locks: Dislock | Celery) -> Callable[..., Iterable[bytes]]:
    """
    Make the WSGI application that serves the metrics, at any path.

    Args:
        locks: The ``Dislock``, or the Celery app whose tasks take the locks.

    Raises:
        ImportError: The extra ``metrics`` is not installed.
    """
    try:
        import prometheus_client  # noqa: PLC0415 -- an extra
    except ImportError as exc:
        raise ImportError(NEEDS) from exc
    registry = prometheus_client.CollectorRegistry()
    registry.register(Collector(locks))
    made: Callable[..., Iterable[bytes]] = prometheus_client.make_wsgi_app(registry)
    return made


class Collector:
    """
    A collector of prometheus_client, to be registered in any registry.  Thread-safe.

    Args:
        locks: See :func:`make_wsgi_app`.
    """

    def __init__(self, locks: Dislock | Celery) -> None:
        self._locks = AppLocks(locks, TIMEOUT)
        self._marks: dict[str, Mapping[str, int]] = {}  # highest counts seen, by worker
        self._cache = Cache(0.0)  # keeps only what took long to read; one thread reads at a time

    def describe(self) -> list[Any]:
        """Return the families without samples, so that a request can choose some by name."""
        return [_family(metric, {}) for metric in METRICS]

    def collect(self) -> Iterator[Any]:
        """Read the lock server, and return a family for each metric; blocks."""
        values = self._cache.get("metrics", self.read).value
        if not values[UP][()]:  # it took long because nobody answered
            self._cache.forget()
        for metric in METRICS:
            yield _family(metric, values.get(metric.name, {}))

    def read(self) -> Values:
        """
        Read all metrics; blocks for some round trips, which grow with the number of locks.

        Never raises a StoreError.  If the server does not answer, there are the counters if those
        were read, and no gauges but the one that says so.
        """
        values: Values = defaultdict(dict)
        values[UP][()] = 0.0
        with suppress(StoreError):
            overview = self._locks.overview  # of its own: batches are for one thread
            self._marks = {
                worker: _not_less(fields, self._marks.get(worker, {}))
                for worker, fields in _counts(overview)
                if fields
            }
            _add_counted(values, self._marks)
            _add_gauges(values, overview)
            values[UP][()] = 1.0
        return values


def _counts(overview: Overview) -> Iterator[tuple[str, dict[str, int]]]:
    """Read what each worker has counted, by field."""
    prefix, server = overview.prefix, overview.server
    index = index_of_counts(prefix)
    names = list(map(decode, server.run(COUNTS, [index])))
    for first in range(0, len(names), TOGETHER):
        some = names[first : first + TOGETHER]
        calls = [(index, name) for name in some]
        replies = server.run_many(COUNTS, calls, within=TIMEOUT)
        for name, reply in zip(some, replies, strict=True):
            if isinstance(reply, StoreError):
                raise reply
            yield name.removeprefix(counts_of(prefix, "")), dict(_fields(reply[0]))


def _add_gauges(values: Values, overview: Overview) -> None:
    site = Site(overview)
    found: dict[str, dict[Labels, float]] = defaultdict(dict)
    names: set[str] = set()
    looked_at = 0
    for row in islice(rows(overview, most=PLACES_SHOWN), LOCKS_MOST):
        looked_at += 1
        for metric, labels, number in _gauges(row.found, site, names):
            known = found[metric.name]
            is_new = labels not in known
            known[labels] = number if is_new else metric.together(known[labels], number)
    values.update(found)
    if looked_at == LOCKS_MOST:
        values["celery_dislock_locks_cut"][()] = 1.0


def _gauges(
    lock: LockState | StoreError, site: Site, names: set[str]
) -> Iterator[tuple[Metric, Labels, float]]:
    """Yield what a lock adds to the gauges."""
    for trouble in troubles_of(lock, site):
        yield IN_TROUBLE, (trouble.name,), 1.0
        if trouble.since is not None:
            yield IN_TROUBLE_FOR, (trouble.name,), trouble.since
    if isinstance(lock, StoreError):
        return
    for metric, of in GAUGES:
        is_ours = metric.labels == (STATE,)
        for given, number in of(lock):
            labels = tuple(str(x) if is_ours else plain(label(x or "", names)) for x in given)
            yield metric, labels, number


def _add_counted(values: Values, counts: Mapping[str, Mapping[str, int]]) -> None:
    for worker, fields in counts.items():
        for field, number in fields.items():
            what, _, rest = field.partition(" ")
            word, _, task = rest.partition(" ")
            metric = COUNTED.get(what)
            if metric is None:  # of another version
                continue
            of_metric = values[metric.name]
            if metric.kind == "histogram":
                parts = of_metric.setdefault((task, worker), [0] * len(PARTS))
                if word in PARTS:
                    parts[PARTS.index(word)] = number
            else:
                labels = (task, worker, word) if OUTCOME in metric.labels else (task, worker)
                of_metric[labels] = number


def _fields(flat: Sequence[bytes]) -> Iterator[tuple[str, int]]:
    for field, number in zip(*[iter(flat)] * 2, strict=True):
        if number.isdigit() and len(number) <= DIGITS_MOST:
            yield decode(field), int(number)


def _not_less(now: Mapping[str, int], before: Mapping[str, int]) -> Mapping[str, int]:
    """Return the counts, none of them less than before, unless the worker's counts began anew."""
    if 2 * sum(now.values()) < sum(before.values()):
        return now
    return {**now, **{field: max(number, now.get(field, 0)) for field, number in before.items()}}


def _family(metric: Metric, values: Mapping[Labels, Any]) -> Any:
    from prometheus_client import core  # noqa: PLC0415 -- an extra

    about = (metric.name.removesuffix("_total"), metric.meaning)
    if metric.kind == "histogram":
        family: Any = core.HistogramMetricFamily(*about, labels=metric.labels)
        for labels, (*numbers, micros) in sorted(values.items()):
            ends = [*map(str, BUCKETS), "+Inf"]
            buckets = list(zip(ends, accumulate(numbers), strict=True))
            family.add_metric(labels, buckets, micros / MICROSECONDS)
        return family
    kind = core.CounterMetricFamily if metric.kind == "counter" else core.GaugeMetricFamily
    family = kind(*about, labels=metric.labels)
    for labels, value in sorted(values.items()):
        family.add_metric(labels, value)
    return family
