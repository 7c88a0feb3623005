"""OpenTelemetry's own instrumentor and SDK, in a worker that runs a task with a lock."""

from __future__ import annotations

import logging

import pytest
from celery import Celery
from celery.contrib.testing.worker import start_worker

from celery_dislock import SingletonTask, current_lease
from celery_dislock.parking.process import runtime_of
from tests.holding import wait_for

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

LIMIT = 30.0  # seconds


@pytest.fixture
def exporter():
    """What the instrumentor has traced."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    instrumentor = CeleryInstrumentor()
    instrumentor.instrument(tracer_provider=provider, meter_provider=MeterProvider())
    yield exporter
    instrumentor.uninstrument()
    provider.shutdown()


@pytest.fixture
def app(redis_url):
    root = logging.getLogger()
    level = root.level
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(dislock_url=redis_url, dislock_metrics=True, worker_hijack_root_logger=False)
    yield app
    runtime_of(app).close()
    app.close()
    root.setLevel(level)  # the worker has changed it


def test_the_instrumentors_span_tells_of_the_lock(app, exporter):
    """Key, way, wait and token as attributes, and when it was got and released as events."""

    @app.task(base=SingletonTask, lock_key="export:<n>", name="shop.export", shared=False)
    def export(n):
        return current_lease().token

    with start_worker(app, pool="threads", concurrency=2, perform_ping_check=False):
        result = export.delay(7)
        token = result.get(timeout=LIMIT)

    def spans():
        found = exporter.get_finished_spans()
        return [one for one in found if one.attributes.get("celery.action") == "run"]

    (span,) = wait_for(spans, "the span of the task")
    prefix = "celery_dislock."
    ours = {
        name.removeprefix(prefix): value
        for name, value in span.attributes.items()
        if name.startswith(prefix)
    }
    assert (ours["key"], ours["outcome"], ours["token"]) == ("export:7", "at_once", token)
    assert 0 <= ours["wait"] < LIMIT
    assert ours["owner"].startswith(result.id)
    events = [event for event in span.events if event.name.startswith(prefix)]
    assert [event.name for event in events] == [f"{prefix}acquired", f"{prefix}released"]
    assert events[-1].attributes[f"{prefix}held"] >= 0
