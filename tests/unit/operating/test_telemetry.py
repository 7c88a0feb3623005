"""What telemetry makes of what it is told: counts, spans, events, and no harm."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from celery.worker import state

import celery_dislock
from celery_dislock import SingletonTask
from celery_dislock.clock import FOREVER
from celery_dislock.config.settings import AppSettings
from celery_dislock.exceptions import StoreError
from celery_dislock.locks.lease import Attempt, Conflict
from celery_dislock.operating import telemetry
from celery_dislock.operating.metrics import COUNTED, OUTCOME
from celery_dislock.operating.telemetry import Telemetry, current_span


def telemetry_of(world, **settings):
    channel = world.watchdog.channel
    telemetry = Telemetry(
        SimpleNamespace(settings=AppSettings(**settings), host="h", channel=channel)
    )
    channel.watchers = [telemetry]
    return telemetry


def test_every_counter_is_counted(world):
    """By its word in the table, with an outcome where the metric has one."""
    watcher, lease = telemetry_of(world, dislock_metrics=True), world.lease()
    watcher.acquired(lease, "at_once", 0.0)
    watcher.resolved(lease, Conflict("k", {}, 1.0), "skip")
    watcher.unavailable(lease, "k", "retry", "away")
    watcher.renewed(lease)
    watcher.capped(lease)
    watcher.lost(lease)
    watcher.ended(lease)
    watcher.message("t", "sent", "")
    assert {what: bool(outcome) for what, outcome, *_ in watcher.counters._events} == {
        word: OUTCOME in metric.labels for word, metric in COUNTED.items()
    }


def test_where_nobody_asked_nothing_is_counted_or_sent(world):
    """Without metrics, spans and tasks the loop has nothing to do."""
    watcher = telemetry_of(world)
    lease = world.lease()
    world.watchdog.channel.lost(lease)
    world.watchdog.channel.capped(lease)
    watcher.message("t", "sent", "")
    watcher.finish()
    assert (watcher.counters, watcher.due_at()) == (None, FOREVER)


def test_counts_that_cannot_be_sent_are_told_once_per_outage(world, caplog):
    """An operator learns why the metrics stand still."""
    watcher = telemetry_of(world, dislock_metrics=True)
    replies = [StoreError("redis://h", "away")] * 2 + [1, 1, StoreError("redis://h", "full")]
    server = SimpleNamespace(run_many=lambda *_, **__: [replies.pop(0)])
    watcher.process.loop_store = SimpleNamespace(lock_server=server)
    for _ in range(4):
        watcher.message("t", "sent", "")
        watcher.run()
    told = [record.getMessage().rpartition(" ")[2] for record in caplog.records]
    assert (told, replies) == (["away", "full"], [])


class FakeSpan:
    def __init__(self):
        self.records = True
        self.attributes = {}
        self.events = []

    def is_recording(self):
        return self.records

    def set_attributes(self, attributes):
        self.attributes.update(attributes)

    def add_event(self, name, attributes):
        self.events.append((name.removeprefix("celery_dislock."), attributes))


class TestSpans:
    """What is told to the span of a task, in a process that uses OpenTelemetry."""

    @pytest.fixture
    def span(self, monkeypatch, world):
        """The span that is current."""
        telemetry_of(world)
        span = FakeSpan()
        module = SimpleNamespace(get_current_span=lambda: span)
        monkeypatch.setitem(sys.modules, "opentelemetry.trace", module)
        return span

    def test_where_nothing_records_nobody_is_told(self, monkeypatch, span):
        """A trace that is sampled out; the module is being imported right now, or never was."""
        assert current_span() is span
        span.records = False
        assert current_span() is None
        for module in (SimpleNamespace(), None):
            monkeypatch.setitem(sys.modules, "opentelemetry.trace", module)
            assert current_span() is None

    def test_this_package_does_not_import_opentelemetry(self):
        """An app that has it installed and does not use it pays nothing for it."""
        files = Path(celery_dislock.__file__).parent.rglob("*.py")
        imports = re.compile(r"^\s*(import|from) opentelemetry", re.MULTILINE)
        assert not any(imports.search(file.read_text("utf-8")) for file in files)

    def test_the_span_of_a_refused_task_names_the_holder(self, app, world, span):
        """Who reads the trace of a skipped task sees why it was skipped."""

        @app.task(base=SingletonTask, lock_key="k", name="shop.export")
        def export(): ...

        world.lease("k")
        export.apply()
        assert span.attributes == {"celery_dislock.key": "k", "celery_dislock.outcome": "skip"}
        [(name, about)] = span.events
        assert (name, about["celery_dislock.holder"]) == ("conflict", "t[1] on w (pid 7)")

    def test_losses_and_caps_are_events_of_the_span(self, app, world, span):
        """They happen in the watchdog, which tells the span that the task had."""

        @app.task(base=SingletonTask, lock_key="k", lock_watchdog_timeout=3, max_renew_times=2)
        def export():
            world.run(10)

        export.apply()
        assert [name for name, _ in span.events] == ["acquired", "capped", "lost"]
        assert span.events[1][1] == {"celery_dislock.key": "k", "celery_dislock.renewals": 2}
        assert "ran out" in span.events[2][1]["celery_dislock.reason"]


class TestEvents:
    """What those who watch the worker hear of the lease of a task that runs."""

    @pytest.fixture
    def sent(self, monkeypatch):
        """What a pool process sends."""
        sent = []
        monkeypatch.setattr(telemetry, "is_pool_process", lambda: True)
        monkeypatch.setattr(telemetry, "send", lambda _app, *event: sent.append(event))
        return sent

    @pytest.fixture
    def task(self, app):
        @app.task(name="t", base=SingletonTask, lock_key="k", shared=False)
        def task(): ...

        app.finalize()
        return app.tasks["t"]

    @pytest.fixture
    def watcher(self, world):
        return telemetry_of(world)

    @pytest.fixture
    def lease(self, world, task, watcher):
        holder = {"task": "t", "id": "1", "worker": "w1@here", "pid": 7}
        lease = world.lock(lock_on_lost="raise").try_acquire(Attempt("me", holder, sender=task))
        lease.renewals = 360
        return lease

    def test_a_pool_process_sends_them_from_the_loop(self, world, watcher, lease, sent):
        """A broker that is away delays no report; key, reason and what becomes of the body."""
        woken = []
        world.watchdog.channel.wake = lambda: woken.append(watcher.due_at())
        lease.lose("somebody deleted it")
        world.watchdog.channel.lost(lease)
        assert (sent, woken) == ([], [0.0])
        watcher.run()
        told = {"uuid": "1", "key": "k", "reason": "somebody deleted it", "action": "raise"}
        assert sent == [("w1@here", "task-lock-lost", told)]
        assert watcher.due_at() == FOREVER

    def test_the_main_process_has_the_dispatcher_of_the_request(self, world, lease, monkeypatch):
        """Which knows whether anybody wants events; a task that is eager has no such request."""
        told = []
        request = Mock(id="1", send_event=lambda type_, **about: told.append((type_, about)))
        world.watchdog.channel.capped(lease)
        # A copy of its message came and was put off: Celery forgets the request of this id then.
        monkeypatch.setattr(state, "requests", {})
        monkeypatch.setattr(state, "active_requests", {Mock(id="2"), request})
        world.watchdog.channel.capped(lease)
        [(type_, fields)] = told
        assert fields.pop("ends_in") == pytest.approx(29.5)
        assert type_ == "task-lock-capped"
        assert fields == {"key": "k", "renewals": 360, "action": "expire"}

    def test_a_task_without_events_has_none(self, world, task, watcher, lease, sent):
        """As Celery's own."""
        task.send_events = False
        world.watchdog.channel.lost(lease)
        watcher.run()
        assert sent == []
