"""Who still uses the lines that are to be drained; the rest is tested on a real server."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from celery import Celery

from celery_dislock import SingletonTask
from celery_dislock.exceptions import SettingsError
from celery_dislock.operating import draining
from celery_dislock.operating.draining import LOOK_EVERY, Drain
from tests.unit.fakes import FakeClock
from tests.unit.operating.cli.conftest import FakeOverview, holder, lock

SWEEP = "old:sweep:{home}"


@pytest.fixture
def app():
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.dislock_url = "redis://nobody/0"
    return app


@pytest.fixture
def clock(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(draining.time, "monotonic", clock)
    monkeypatch.setattr(draining.time, "sleep", clock.advance)
    return clock


@pytest.fixture
def drain(app, clock):
    drain = Drain(app, None, "old")
    drain._there.sweep_name = SWEEP
    drain._overview = FakeOverview()
    drain._there.lines = type("Lines", (), {"names": lambda _self: ["old:{a}"]})()
    return drain


def test_nobody_is_looked_for_any_longer_than_that(drain, clock):
    """A worker asks for the sweep once per interval, so one look is not enough."""
    began = clock()
    assert drain.workers(10.0) == []
    assert 10.0 <= clock() - began <= 10.0 + LOOK_EVERY


def test_a_worker_that_comes_to_sweep_is_seen(drain, clock, monkeypatch):
    """It has waited for its interval; who is seen first ends the search."""
    sweeper = lock("sweep", name=SWEEP, holders=[holder(worker="w1@h")])

    def pause(seconds):
        clock.advance(seconds)
        drain._overview.put(sweeper)

    monkeypatch.setattr(draining.time, "sleep", pause)
    assert [one.worker for one in drain.workers(10.0)] == ["w1@h"]


@pytest.mark.parametrize(
    ("changed", "seen"),
    [({}, True), ({"renewed": 29.0, "remaining": 1.0}, False), ({"worker": None}, False)],
)
def test_a_live_lease_shows_a_worker_that_is_too_busy_to_sweep(drain, changed, seen):
    """One that nobody renews is of a dead worker, and one of a thread sweeps nothing."""
    drain._overview.put(lock(name="old:{a}", waiting=1, line=[], holders=[holder(**changed)]))
    drain._parked = lambda _lock: [1]
    assert bool(drain.workers(0.0)) is seen


def test_there_must_be_lines_and_they_must_be_elsewhere(app, drain):
    """Several servers keep none; and where the app's locks are there is nothing to drain."""
    drain._here.identity = drain._there.identity = SimpleNamespace(confirm=lambda: "f" * 16)
    with pytest.raises(SettingsError, match="where the app's locks are"):
        drain.check()
    with pytest.raises(SettingsError, match="keep no parked tasks"):
        Drain(app, ["redis://a", "redis://b", "redis://c"], None)


def test_the_interval_is_that_of_the_apps_tasks(app, drain):
    """Or a third of the default timeout."""

    @app.task(base=SingletonTask, lock_key="k", lock_watchdog_timeout=6, shared=False)
    def export(): ...

    app.finalize()
    for tasks, seconds in (({}, 10.0), ({export.name: app.tasks[export.name]}, 2.0)):
        drain._app = SimpleNamespace(tasks=tasks)  # an app has shared tasks of others, too
        assert drain.interval == seconds
