"""Serve the metrics of an app's locks to Prometheus.

Mount it at ``/metrics`` of any WSGI application, or serve it alone::

    from wsgiref.simple_server import make_server
    from celery_dislock.operating.web.metrics import make_wsgi_app

    make_server("127.0.0.1", 9540, make_wsgi_app(app)).serve_forever()

It reads the lock server, and needs no worker in its process.  If a reading takes long, because
there are very many locks, those who ask meanwhile get the last one.  It answers 200 also if the
lock server is away: ``celery_dislock_server_up`` is 0 then.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

from celery_dislock.operating.locks import AppLocks
from celery_dislock.operating.metrics import BUCKETS, METRICS, MICROSECONDS
from celery_dislock.operating.scraping import Metrics, Reading
from celery_dislock.operating.web.cache import Cache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from celery import Celery

    from celery_dislock.locks.runtime import Runtime
    from celery_dislock.operating.metrics import Metric

    class Dislock(Protocol):
        """What is needed of one; it stands above this module."""

        runtime: Runtime[Any]


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
    A collector of prometheus_client, to be registered in any registry.

    Args:
        locks: See :func:`make_wsgi_app`.
    """

    def __init__(self, locks: Dislock | Celery) -> None:
        self._metrics = Metrics(AppLocks(locks).runtime)
        self._cache = Cache(0.0)  # keeps only what took long to read

    def describe(self) -> list[Any]:
        """Return the families without samples, so that a request can choose some by name."""
        return [_family(metric, Reading()) for metric in METRICS]

    def collect(self) -> Iterator[Any]:
        """Read the lock server, and return a family for each metric; blocks."""
        reading = self._cache.get("metrics", self._metrics.read).value
        if not reading.up:  # it took long because nobody answered
            self._cache.forget()
        for metric in METRICS:
            yield _family(metric, reading)


def _family(metric: Metric, reading: Reading) -> Any:
    from prometheus_client import core  # noqa: PLC0415 -- an extra

    about = (metric.name.removesuffix("_total"), metric.meaning)
    if metric.kind == "histogram":
        family: Any = core.HistogramMetricFamily(*about, labels=metric.labels)
        for labels, (*numbers, micros) in sorted(reading.values[metric.name].items()):
            ends = [*map(str, BUCKETS), "+Inf"]
            buckets = list(zip(ends, accumulate(numbers), strict=True))
            family.add_metric(labels, buckets, micros / MICROSECONDS)
        return family
    kind = core.CounterMetricFamily if metric.kind == "counter" else core.GaugeMetricFamily
    family = kind(*about, labels=metric.labels)
    for labels, value in sorted(reading.values[metric.name].items()):
        family.add_metric(labels, value)
    return family
