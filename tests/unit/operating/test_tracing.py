"""What OpenTelemetry is told, in a process that uses it and in one that does not."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import celery_dislock
from celery_dislock import SingletonTask
from celery_dislock.config.settings import AppSettings
from celery_dislock.operating import tracing
from celery_dislock.operating.metrics import COUNTED
from celery_dislock.operating.telemetry import Telemetry
from celery_dislock.operating.tracing import current_span, instruments


class FakeSpan:
    def __init__(self, *, records=True):
        self.records = records
        self.attributes = {}
        self.events = []

    def is_recording(self):
        return self.records

    def set_attributes(self, attributes):
        self.attributes.update(attributes)

    def add_event(self, name, attributes):
        self.events.append((name, attributes))


class FakeMeter:
    def __init__(self):
        self.recorded = []

    def make(self, name, **_about):
        def record(value, attributes):
            self.recorded.append((name, value, dict(attributes)))

        return SimpleNamespace(add=record, record=record)

    create_counter = create_histogram = create_up_down_counter = make


@pytest.fixture
def span(monkeypatch, world):
    """The span that is current."""
    settings = AppSettings(dislock_metrics=False)
    world.watchdog.reports.observer = Telemetry(SimpleNamespace(settings=settings))
    span = FakeSpan()
    module = SimpleNamespace(get_current_span=lambda: span)
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", module)
    return span


@pytest.fixture
def meter(monkeypatch):
    """The meter of a process that uses OpenTelemetry's metrics."""
    meter = FakeMeter()
    provider = SimpleNamespace(get_meter=lambda _name: meter)
    module = SimpleNamespace(get_meter_provider=lambda: provider)
    monkeypatch.setitem(sys.modules, "opentelemetry.metrics", module)
    monkeypatch.setattr(tracing, "_made", [])
    return meter


@pytest.mark.parametrize("module", [None, SimpleNamespace()])
def test_without_opentelemetry_nobody_is_told(monkeypatch, module):
    """It was not imported, or is being imported right now."""
    for name in ("opentelemetry.trace", "opentelemetry.metrics"):
        if module is None:
            monkeypatch.delitem(sys.modules, name, raising=False)
        else:
            monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(tracing, "_made", [])
    assert current_span() is None
    assert instruments() is None


def test_this_package_does_not_import_opentelemetry():
    """An app that has it installed and does not use it pays nothing for it."""
    texts = [file.read_text("utf-8") for file in Path(celery_dislock.__file__).parent.rglob("*.py")]
    assert not any(
        re.search(r"^\s*(import|from) opentelemetry", text, re.MULTILINE) for text in texts
    )


@pytest.mark.parametrize("name", ["_ProxyMeterProvider", "NoOpMeterProvider"])
def test_the_api_alone_records_nothing(monkeypatch, name):
    """redis-py imports it wherever it is installed; what counts is that the app has set it up."""
    provider = type(name, (), {})()
    module = SimpleNamespace(get_meter_provider=lambda: provider)
    monkeypatch.setitem(sys.modules, "opentelemetry.metrics", module)
    monkeypatch.setattr(tracing, "_made", [])
    assert instruments() is None


def test_a_span_that_does_not_record_is_not_told(span):
    """A sampled-out trace costs no attributes."""
    span.records = False
    assert current_span() is None


def test_the_span_of_a_refused_task_names_the_holder(app, world, span):
    """Who reads the trace of a skipped task sees why it was skipped."""

    @app.task(base=SingletonTask, lock_key="k", name="shop.export")
    def export(): ...

    world.lease("k")
    export.apply()
    assert span.attributes == {"celery_dislock.key": "k", "celery_dislock.outcome": "skip"}
    (event,) = span.events
    assert event[0] == "celery_dislock.conflict"
    assert event[1]["celery_dislock.holder"] == "t[1] on w (pid 7)"


def test_losses_and_caps_are_events_of_the_span(app, world, span):
    """They happen in the watchdog, which tells the span that the task had."""

    @app.task(base=SingletonTask, lock_key="k", lock_watchdog_timeout=3, max_renew_times=2)
    def export():
        world.run(10)

    export.apply()
    names = [name.rpartition(".")[2] for name, _ in span.events]
    assert names == ["acquired", "capped", "lost"]
    assert "ran out" in span.events[-1][1]["celery_dislock.reason"]
    assert ("celery_dislock.capped", {"celery_dislock.key": "k", "celery_dislock.renewals": 2}) in (
        span.events
    )


def test_every_metric_has_an_instrument(meter):
    """What is counted for Prometheus is recorded for OpenTelemetry, too, by the same labels."""
    for word in COUNTED:
        instruments().record(word, "skip", "t", "w", 1)
    names = sorted(name.removeprefix("celery_dislock.") for name, *_ in meter.recorded)
    assert " ".join(names) == (
        "acquisitions capped conflicts held leases leases lost messages renewals unavailable wait"
    )
    labels = {"task": "t", "worker": "w", "outcome": "skip"}
    assert ("celery_dislock.conflicts", 1, labels) in meter.recorded
