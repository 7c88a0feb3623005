"""What a worker releases when it comes back, and what it leaves alone."""

from __future__ import annotations

import logging
import os
import socket
from types import SimpleNamespace

import pytest
from celery.concurrency import solo
from celery.concurrency.prefork import TaskPool
from kombu.transport.memory import Transport

from celery_dislock import SingletonTask
from celery_dislock.exceptions import StoreError
from celery_dislock.parking.process import runtime_of
from celery_dislock.worker import predecessor as comeback

NAME = "w1@here"
GONE = os.getpid() + 1
LOCK = "dislock:{k}"


class Control:
    """Stands for an app's remote control; the answers are those of all of them."""

    answers = ()
    error = None
    asked: list  # of each ping: whom

    def __init__(self, app):
        self.mailbox = SimpleNamespace()

    def ping(self, destination, timeout, connection, limit):
        if self.error:
            raise self.error
        self.asked.append(destination)
        return self.answers[len(self.asked) - 1] if self.answers else []


@pytest.fixture
def control(app, monkeypatch):
    monkeypatch.setattr(Control, "asked", [], raising=False)
    monkeypatch.setattr(Control, "answers", ())
    monkeypatch.setattr(Control, "error", None)
    app.control = Control(app)
    return Control


@pytest.fixture
def worker(app, monkeypatch):
    """A worker that comes back; of the process ids, one lives."""
    state = SimpleNamespace(app=app, hostname=NAME, pool_cls=TaskPool, living=set())
    monkeypatch.setattr(comeback, "is_alive", lambda pid: pid in state.living)

    @app.task(name="export", base=SingletonTask, lock_key="k")
    def export(): ...

    return state


def leave(world, lock=LOCK, owner=None, **holder):
    """Leave a lease as a dead worker of that name does."""
    holder = {
        "task": "export",
        "id": "1",
        "worker": NAME,
        "pid": GONE,
        "host": socket.gethostname(),
        **holder,
    }
    owner = owner or f"{holder['id']}@{holder['worker']}:{holder['pid']}/0123abcd.1"
    world.store.leases[lock] = (owner, world.clock() + 30, holder)
    return owner


def come_back(worker, caplog):
    with caplog.at_level(logging.INFO, "celery_dislock"):
        comeback.release_left_behind(worker, runtime_of(worker.app))
    return caplog.text


def test_what_a_dead_worker_of_its_name_holds_is_released(world, worker, control, caplog):
    """Each lease is released by its very owner, and named in the log."""
    owner = leave(world)
    said = come_back(worker, caplog)
    assert world.store.asked("release") == [(LOCK, owner, 0.0)]
    assert world.store.leases == {}
    assert control.asked == [[NAME]] * 2
    assert "Released the lock dislock:{k} of export[1]" in said


def test_without_any_nothing_is_asked(world, worker, control, caplog):
    """The locks are looked through once, and the broker is left alone."""
    leave(world, worker="w2@here")
    assert not come_back(worker, caplog)
    assert [call[0] for call in world.store.calls] == ["all_holders"]
    assert control.asked == []


@pytest.mark.parametrize("answers", [[["pong"]], [[], ["pong"]]], ids=["at once", "asked again"])
def test_another_worker_of_that_name_keeps_its_locks(world, worker, control, caplog, answers):
    """One answer is enough, be it to the second question."""
    leave(world)
    control.answers = answers
    assert f"left to expire in 30.0 s: another worker {NAME} lives" in come_back(worker, caplog)
    assert world.store.asked("release") == []


@pytest.mark.parametrize(
    ("holder", "why"),
    [
        ({"host": "elsewhere"}, "on another machine"),
        ({"host": None}, "on another machine"),
        ({"pid": None}, "not known"),
        ({"pid": 0}, "not known"),
        ({"pid": -1}, "not known"),
        ({"pid": 2**70}, "not known"),
        ({"task": "unheard"}, "does not know that task's lock"),
        ({"task": None}, "does not know that task's lock"),
        ({"task": "celery.chord"}, "does not know that task's lock"),
    ],
)
def test_what_may_be_anothers_is_kept(world, worker, control, caplog, holder, why):
    """Whatever does not speak for a death speaks against the release; nobody is pinged for it."""
    leave(world, **holder)
    assert why in come_back(worker, caplog)
    assert world.store.asked("release") == []
    assert control.asked == []


def test_a_living_process_keeps_its_lock(world, worker, control, caplog):
    """A child of a worker that is being shut down, or has lost its broker, answers no ping."""
    leave(world)
    worker.living.add(GONE)
    assert f"there is a process {GONE}" in come_back(worker, caplog)
    assert world.store.asked("release") == []


def test_a_worker_that_has_the_dead_ones_process_id_releases(world, worker, control, caplog):
    """In a container the first process has the same id each time; its own leases are its own."""
    worker.living.add(os.getpid())
    leave(world, pid=os.getpid())
    own = runtime_of(worker.app).process
    mine = f"2@{NAME}:{os.getpid()}/{own._nonce}.1"
    leave(world, "dislock:{own}", mine, pid=os.getpid())
    come_back(worker, caplog)
    assert list(world.store.leases) == ["dislock:{own}"]


@pytest.mark.parametrize("option", ["release_on_failure", "release_on_success"])
def test_what_may_be_left_on_purpose_is_kept(app, world, worker, control, caplog, option):
    """A lease that its execution has left to expire looks like one whose process died."""

    @app.task(name="keep", base=SingletonTask, lock_key="k", **{option: False})
    def keep(): ...

    leave(world, task="keep")
    assert "left to expire" in come_back(worker, caplog)
    assert world.store.asked("release") == []


def test_a_lease_that_only_runs_out_is_none_of_its_business(world, worker, control, caplog):
    """lock_at_least_for after a body that has ended: there is nothing to release or to say."""
    owner = leave(world)
    world.store.leases[LOCK] = ("~" + owner, *world.store.leases[LOCK][1:])
    assert not come_back(worker, caplog)
    assert control.asked == []


def test_a_lock_is_held_for_its_least_time_all_the_same(app, world, worker, control, caplog):
    """lock_at_least_for counts from the acquisition, whatever became of the worker."""

    @app.task(name="slow", base=SingletonTask, lock_key="k", lock_at_least_for=9)
    def slow(): ...

    owner = leave(world, task="slow")
    come_back(worker, caplog)
    assert world.store.asked("release") == [(LOCK, owner, 9.0)]


def test_a_solo_pool_releases_nothing(world, worker, control, caplog):
    """A busy worker of that pool answers no ping."""
    worker.pool_cls = solo.TaskPool
    leave(world)
    assert "solo" in come_back(worker, caplog)
    assert world.store.asked("release") == []


def test_without_remote_control_nothing_is_released(world, worker, control, caplog):
    """Nobody could answer."""
    worker.app.conf.worker_enable_remote_control = False
    leave(world)
    assert "remote control is off" in come_back(worker, caplog)
    assert world.store.asked("release") == []
    assert control.asked == []


def test_a_broker_without_remote_control_releases_nothing(
    world, worker, control, caplog, monkeypatch
):
    """A broadcast that reaches nobody is no silence."""
    monkeypatch.setattr(
        Transport, "implements", Transport.implements.extend(exchange_type=frozenset(["direct"]))
    )
    leave(world)
    assert "no remote control" in come_back(worker, caplog)
    assert world.store.asked("release") == []


def test_a_broker_that_fails_releases_nothing(world, worker, control, caplog):
    """An error is no silence, and does not keep the worker from starting."""
    control.error = ConnectionError("refused")
    leave(world)
    assert "did not tell whether another worker w1@here lives: refused" in come_back(worker, caplog)
    assert world.store.asked("release") == []


def test_a_lock_server_that_fails_is_logged(world, worker, control, caplog):
    """The worker starts all the same."""
    world.store.away = True
    assert "left to expire: lock server redis://fake: away" in come_back(worker, caplog)


def test_a_release_that_fails_is_logged(world, worker, control, caplog, monkeypatch):
    """What was found is left to expire."""

    def release(*_):
        raise StoreError("redis://fake", "away")

    monkeypatch.setattr(world.store, "release", release)
    leave(world)
    assert "Could not release what a worker w1@here has left" in come_back(worker, caplog)


def test_whatever_goes_wrong_the_worker_starts(world, worker, control, caplog):
    """An error that nobody thought of is logged with its traceback."""
    world.store.leases[LOCK] = ("x", world.clock() + 30, None)
    assert "Traceback" in come_back(worker, caplog)


def test_the_search_ends_in_time(world, worker, control, caplog, monkeypatch):
    """What was found until then is released; the rest is left to expire, and the log says so."""
    monkeypatch.setattr(comeback, "SEARCH_FOR", -1)
    leave(world)
    leave(world, "dislock:{l}")
    assert "Stopped looking" in come_back(worker, caplog)
    assert list(world.store.leases) == ["dislock:{l}"]
