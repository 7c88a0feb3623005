"""What ``drain`` shows, asks and tells, and who still uses the lines that are to be drained."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from celery import Celery

from celery_dislock import SingletonTask
from celery_dislock.exceptions import SettingsError
from celery_dislock.operating.cli import draining
from celery_dislock.operating.cli.draining import LOOK_EVERY, Drain, Sent
from celery_dislock.parking.process import StoreIdentity
from tests.unit.fakes import FakeClock
from tests.unit.operating.cli.conftest import FakeOverview, holder, lock, place

FOUND, USAGE = 1, 2


class FakeDrain:
    """A store with two lines."""

    here, there, interval = "redis://new, prefix dislock", "redis://old, prefix dislock", 10.0

    def __init__(self):
        self.found = []
        self.sent = [Sent("dislock:{a}", "1:0:0"), Sent("dislock:{b}", "2:0:0")]
        self.error = None
        self.asked = []

    def __call__(self, _app, url, prefix):
        self.asked.append((url, prefix))
        return self

    def check(self):
        if self.error:
            raise self.error

    def lines(self):
        return iter([lock("a", waiting=7, turns=[place()]), lock("b\x1b", waiting=1)])

    def workers(self, seconds):
        self.asked.append(seconds)
        return self.found

    def run(self):
        self.asked.append("run")
        yield from self.sent

    def close(self):
        self.asked.append("closed")


@pytest.fixture
def drain(monkeypatch):
    fake = FakeDrain()
    monkeypatch.setattr(draining, "Drain", fake)
    return fake


def test_the_lines_are_shown_and_sent_on_after_a_yes(dislock, drain):
    """With how many are in each, those with a turn too; then how many were sent."""
    answer = dislock("drain", "--from-url", "redis://old", input="y\n")
    assert answer.exit_code == 0
    assert answer.stdout.splitlines()[:2] == ["KEY    IN LINE", "a      8"]
    assert "\x1b" not in answer.stdout
    assert "9 parked in 2 lines on redis://old, prefix dislock." in answer.stderr
    assert "Send them on, to redis://new, prefix dislock?" in answer.stderr
    assert "Sent on 2." in answer.stderr
    assert drain.asked == [("redis://old", None), 15.0, "run", "closed"]


def test_who_answers_no_changes_nothing(dislock, drain):
    """The lines were shown; the exit code is that of a finding."""
    assert dislock("drain", "--from-prefix", "old", input="n\n").exit_code == FOUND
    assert drain.asked == [(None, "old"), 15.0, "closed"]


def test_a_drain_from_nowhere_and_from_here_is_wrong_usage(dislock, drain):
    """Nothing is looked at."""
    assert "--from-url URL, --from-prefix PREFIX" in dislock("drain").stderr
    drain.error = SettingsError("drain", "dislock_url", "redis://new", "this is where")
    assert dislock("drain", "--from-url", "redis://new", "--yes").exit_code == USAGE
    assert drain.asked == [("redis://new", None), "closed"]


def test_a_store_that_is_lost_is_taken_over_by_its_name(dislock, monkeypatch):
    """Nothing is left there to be sent on; anything but a name is wrong usage."""
    taken = []
    monkeypatch.setattr(StoreIdentity, "take_over", lambda _self, name: taken.append(name))
    answer = dislock("drain", "--lost", "f" * 16)
    assert (answer.exit_code, taken) == (0, ["f" * 16])
    assert "belong here now" in answer.stderr
    assert dislock("drain", "--lost", "all").exit_code == USAGE
    dislock.app.conf.dislock_url = ["redis://a", "redis://b", "redis://c"]
    dislock.app.__dict__.pop("_dislock_runtime", None)
    assert dislock("drain", "--lost", "f" * 16).exit_code == USAGE


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
def old(app, clock):
    old = Drain(app, None, "old")
    old._there.sweep_name = SWEEP
    old._overview = FakeOverview()
    old._there.lines = type("Lines", (), {"names": lambda _self: ["old:{a}"]})()
    return old


def test_nobody_is_looked_for_any_longer_than_that(old, clock):
    """A worker asks for the sweep once per interval, so one look is not enough."""
    began = clock()
    assert old.workers(10.0) == []
    assert 10.0 <= clock() - began <= 10.0 + LOOK_EVERY


@pytest.mark.parametrize(
    ("changed", "seen"),
    [({}, True), ({"renewed": 29.0, "remaining": 1.0}, False), ({"worker": None}, False)],
)
def test_a_live_lease_shows_a_worker_that_is_too_busy_to_sweep(old, changed, seen):
    """One that nobody renews is of a dead worker, and one of a thread sweeps nothing."""
    old._overview.put(lock(name="old:{a}", waiting=1, line=[], holders=[holder(**changed)]))
    old._parked = lambda _lock: [1]
    assert bool(old.workers(0.0)) is seen


def test_there_must_be_lines_and_they_must_be_elsewhere(app, old):
    """Several servers keep none; and where the app's locks are there is nothing to drain."""
    old._here.identity = old._there.identity = SimpleNamespace(confirm=lambda: "f" * 16)
    with pytest.raises(SettingsError, match="where the app's locks are"):
        old.check()
    with pytest.raises(SettingsError, match="keep no parked tasks"):
        Drain(app, ["redis://a", "redis://b", "redis://c"], None)


def test_the_interval_is_that_of_the_apps_tasks(app, old):
    """Or a third of the default timeout."""

    @app.task(base=SingletonTask, lock_key="k", lock_watchdog_timeout=6, shared=False)
    def export(): ...

    app.finalize()
    for tasks, seconds in (({}, 10.0), ({export.name: app.tasks[export.name]}, 2.0)):
        old._app = SimpleNamespace(tasks=tasks)  # an app has shared tasks of others, too
        assert old.interval == seconds
