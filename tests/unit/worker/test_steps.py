"""The steps of a worker: its command line, its lock server, its children, and the sweep."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from celery import Celery, Task
from celery.concurrency.solo import TaskPool

from celery_dislock import Dislock, StoreError
from celery_dislock.parking.process import runtime_of
from celery_dislock.servers.store import Store
from celery_dislock.worker.steps import LockStep, SweepStep
from tests.declaring import declare


@pytest.fixture
def app(plain_app):
    return plain_app


@pytest.fixture
def worker(app, timer):
    return SimpleNamespace(app=app, pool_cls=TaskPool, hostname="w1@here", timer=timer)


def test_the_worker_says_where_its_locks_are(app, worker, caplog):
    """One line has all that two workers must share to share a lock: the server and the prefix."""
    declare(app, name="singleton")
    app.conf.dislock_prefix = "staging"
    with caplog.at_level(logging.INFO, "celery_dislock"):
        LockStep(worker).start(None)
    assert caplog.messages[0] == (
        "Locks are on; lock server: redis://localhost:1/0, prefix: staging"
    )


def test_a_bad_setting_stops_a_worker_that_locks_nothing(app, worker):
    """A --dislock-url that no task uses is checked all the same; --no-dislock checks nothing."""
    with pytest.raises(SystemExit, match="dislock_url='http://x': give the lock server's URL"):
        LockStep(worker, dislock_url=("http://x",))
    LockStep(worker, dislock=False)


def test_no_dislock_says_so_loudly(app, worker, caplog):
    """An operator sees in the log that nothing locks."""
    step = LockStep(worker, dislock=False)
    assert step.include_if(None)  # or Celery would not start it
    step.start(None)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "LOCKS ARE OFF" in record.message


def test_the_command_line_wins_over_the_setting(app, worker, reachable):
    """--dislock and --dislock-url are written to the app's configuration."""
    app.conf.dislock_enabled = False
    LockStep(worker, dislock=True, dislock_url="redis://other:1/3")
    assert runtime_of(app).enabled is True
    assert runtime_of(app).process.store.server == "redis://other:1/3"


def test_a_worker_without_a_lock_server_refuses_to_start(app, worker, monkeypatch):
    """The message names the server and the ways out; without a flag there must be one, too."""

    def ping(_):
        raise StoreError("redis://localhost:1/0", "Connection refused")

    monkeypatch.setattr(Store, "ping", ping)
    with pytest.raises(SystemExit, match="redis://localhost:1/0: Connection refused") as caught:
        LockStep(worker, dislock=True)
    assert "--no-dislock" in caught.value.code
    other = Celery("shop", broker="amqp://localhost//", set_as_current=False)
    Dislock(other)
    declare(other, name="singleton")
    with pytest.raises(SystemExit, match="dislock_url"):
        LockStep(SimpleNamespace(app=other, pool_cls=TaskPool, hostname="w1@here"))


def test_dead_children_are_looked_for_often(app):
    """The event loop asks the pool to look for exits, once however often it is set up."""
    calls = []

    class Hub:
        def call_repeatedly(self, delay, call):
            calls.append(call)
            return SimpleNamespace(cancel=lambda: calls.remove(call))

    declare(app, name="singleton")
    step = LockStep(SimpleNamespace(app=app, pool_cls=TaskPool, hostname="w1@here"))
    worker = SimpleNamespace(pool=SimpleNamespace(maintain_pool="maintain"))
    step.register_with_event_loop(worker, Hub())
    step.register_with_event_loop(worker, Hub())
    assert calls == ["maintain"]
    step.register_with_event_loop(SimpleNamespace(pool=SimpleNamespace()), Hub())


@pytest.fixture
def sweeps(monkeypatch):
    """Stand for the sweep; each step wants the next one a second later than the last."""
    made = []

    class Sweep:
        def __init__(self, *told, looks_first):
            self.looks_first = looks_first
            self.told, self.steps, self.ended = told, 0, 0
            made.append(self)

        def step(self):
            self.steps += 1
            return float(self.steps)

        def end(self):
            self.ended += 1

    monkeypatch.setattr("celery_dislock.worker.steps.Sweep", Sweep)
    return made


def test_a_worker_without_a_task_that_locks_does_not_sweep(app, worker):
    """One with tasks that do not park does: others may have left a line."""
    declare(app, name="plain", base=Task, lock_key=None)
    assert SweepStep(worker).include_if(worker) is False
    declare(app, name="skips")
    assert SweepStep(worker).include_if(worker) is True


@pytest.mark.parametrize(
    "conf", [{"dislock_enabled": False}, {"dislock_url": ["redis://a", "redis://b", "redis://c"]}]
)
def test_where_nothing_is_parked_nobody_sweeps(app, worker, conf):
    """Without locks, and with several lock servers, whatever a callable may say."""
    app.conf.update(conf)
    declare(app, lock_on_conflict=lambda *_: None)
    assert SweepStep(worker).include_if(worker) is False


@pytest.fixture
def step(app, worker, sweeps):
    """A step that has started."""
    options = {"lock_on_conflict": "queue", "lock_watchdog_timeout": 6.0}
    declare(app, name="parks", **options)
    step = SweepStep(worker)
    step.include_if(worker)
    step.start(worker)
    return step


def test_a_worker_sweeps_in_its_timer(app, worker, step, sweeps):
    """At once, and then whenever the step before says; with connections of its own."""
    [sweep] = sweeps
    process, *told = sweep.told
    assert told == [runtime_of(app).process.sweep_name, "w1@here", 2.0]
    assert process is not runtime_of(app).process
    for after in (0.0, 1.0, 2.0):
        entry = worker.timer.due.pop()
        assert (entry.after, worker.timer.due) == (after, [])
        entry.run()
    step.stop(worker)
    assert (worker.timer.due, sweep.ended) == ([], 1)


def test_those_whom_the_sweep_has_ended_are_told_to_monitors(worker, step, sweeps):
    """By the worker's dispatcher, as it is then."""
    sent = []
    dispatcher = SimpleNamespace(send=lambda type_, **fields: sent.append((type_, fields)))
    worker.consumer = SimpleNamespace(event_dispatcher=dispatcher)
    sweeps[0].tell({"1": "why"})
    [(event, fields)] = sent
    assert event == "task-revoked"
    assert (fields["uuid"], fields["reason"], fields["state"]) == ("1", "why", "REVOKED")
