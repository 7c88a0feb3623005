"""OpenTelemetry's own instrumentor and SDK, in a worker that runs tasks with locks."""

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
POOLS = ("threads",)  # else the worker runs in the thread of the test


@pytest.fixture
def exported():
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
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(dislock_url=redis_url, dislock_metrics=True, worker_hijack_root_logger=False)
    yield app
    runtime_of(app).close()
    app.close()


@pytest.fixture(params=POOLS)
def run(app, request):
    """Send tasks to a worker of this process, and wait for their results."""
    root = logging.getLogger()
    level = root.level

    def run(task, *args):
        with start_worker(app, pool=request.param, concurrency=2, perform_ping_check=False):
            result = task.delay(*args)
            result.get(timeout=LIMIT, propagate=False)
        return result

    yield run
    root.setLevel(level)  # the worker has changed it


def span_of(exported, task_id):
    """Return the span in which a task ran."""

    def found():
        spans = exported.get_finished_spans()
        return [
            span
            for span in spans
            if span.attributes.get("celery.action") == "run"
            and span.attributes.get("messaging.message.id", task_id) == task_id
        ]

    return wait_for(found, "the span of the task")[-1]


def ours(span):
    return {
        name.removeprefix("celery_dislock."): value
        for name, value in span.attributes.items()
        if name.startswith("celery_dislock.")
    }


def names_of(span):
    return [event.name for event in span.events if event.name.startswith("celery_dislock.")]


def test_the_instrumentors_span_tells_of_the_lock(app, run, exported):
    """Key, way, wait and token as attributes, and when it was got and released as events."""

    @app.task(base=SingletonTask, lock_key="export:<n>", name="shop.export", shared=False)
    def export(n):
        return current_lease().token

    result = run(export, 7)
    span = span_of(exported, result.id)
    about = ours(span)
    assert about["key"] == "export:7"
    assert about["outcome"] == "at_once"
    assert about["token"] == result.result
    assert 0 <= about["wait"] < LIMIT
    assert about["owner"].startswith(result.id)
    assert names_of(span) == ["celery_dislock.acquired", "celery_dislock.released"]
    assert span.events[-1].attributes["celery_dislock.held"] >= 0
