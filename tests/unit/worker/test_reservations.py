"""A worker renews the reservations of messages that wait in it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from celery.app.task import Context

from celery_dislock import SingletonTask
from celery_dislock.exceptions import StoreError
from celery_dislock.worker import reservations
from celery_dislock.worker.reservations import RENEWALS, ReservationStep
from tests.unit.deliveries import noted

LOCK = "dislock:{edit:1}"


class Store:
    """Its own reservations: keeps what it was asked, or fails."""

    fails = None

    def __init__(self):
        self.kept = []
        self.kept_of_running = []
        self.reservations = self

    def keep(self, reservations, *, runs, within):
        assert within > 0
        if self.fails:
            raise self.fails
        kept = self.kept_of_running if runs else self.kept
        kept.append([(one.lock, one.id, one.until, one.ttl) for one in reservations])

    def close(self):
        self.kept.append("closed")


class Request:
    """A message that a worker has."""

    def __init__(self, task, header=None, id="a"):  # noqa: A002 -- as Celery has it
        headers = {} if header is None else noted(unique=header)
        self.id, self.task = id, task
        self.message = SimpleNamespace(headers=headers)
        self._context = Context(id=id, **headers)


@pytest.fixture
def app(plain_app):

    @plain_app.task(
        name="edit",
        base=SingletonTask,
        lock_key="edit:<doc>",
        lock_unique_until="start",
        lock_unique_for=100,
        shared=False,
    )
    def edit(doc): ...

    @plain_app.task(
        name="free",
        base=SingletonTask,
        lock_key="edit:<doc>",
        lock_limit=None,
        lock_unique_until="end",
        lock_unique_for=200,
        shared=False,
    )
    def free(doc): ...

    @plain_app.task(name="plain", shared=False)
    def plain(): ...

    return plain_app


@pytest.fixture
def world(app, timer, monkeypatch):
    """A step that has started, its store, and the worker's requests."""
    state = SimpleNamespace(reserved_requests=set(), active_requests=set(), revoked=set())
    monkeypatch.setattr(reservations, "state", state)
    worker = SimpleNamespace(app=app, timer=timer)
    step = ReservationStep(worker)
    assert step.include_if(worker)
    step.start(worker)
    step._store = store = Store()

    def tick():
        timer.due.pop().run()

    return SimpleNamespace(state=state, store=store, tick=tick, worker=worker, step=step)


def test_what_waits_is_renewed(app, world):
    """Prefetched, or held for its ETA; in one round trip, for lock_unique_for."""
    edit = app.tasks["edit"]
    world.state.reserved_requests = {Request(edit, [LOCK, "start"])}
    world.tick()
    assert world.store.kept == [[(LOCK, "a", "start", 100.0)]]
    assert world.worker.timer.due[0].after == 60 / RENEWALS  # two timeouts of a lease are less


@pytest.mark.parametrize(
    ("name", "header", "revoked"),
    [
        ("edit", None, False),
        ("edit", "x", False),
        ("edit", [LOCK, "expiry"], False),
        ("edit", ["other:{k}", "start"], False),
        ("edit", [LOCK, "start"], True),
        ("plain", [LOCK, "end"], False),
    ],
)
def test_what_has_no_reservation_to_renew_is_left_alone(app, world, name, header, revoked):
    """None, a forged one, one that ends at a certain time, or that of a message that is revoked."""
    world.state.reserved_requests = {Request(app.tasks[name], header)}
    world.state.revoked = {"a"} if revoked else set()
    world.tick()
    assert world.store.kept == []


@pytest.mark.parametrize(("name", "ttl"), [("edit", 60.0), ("free", 200.0)])
def test_what_runs_is_renewed(app, world, name, ttl):
    """It may be stopped, or have no lease with which its process would renew it."""
    request = Request(app.tasks[name], [LOCK, "end"])
    started = Request(app.tasks[name], [LOCK, "start"], id="b")
    world.state.reserved_requests = world.state.active_requests = {request, started}
    world.tick()
    assert world.store.kept == []
    assert world.store.kept_of_running == [[(LOCK, "a", "end", ttl)]]


def test_nothing_stops_it(app, world):
    """The next step tries again; other errors are those of every step."""
    world.state.reserved_requests = {Request(app.tasks["edit"], [LOCK, "start"])}
    world.store.fails = StoreError("redis://x", "away")
    world.tick()
    world.store.fails = None
    world.tick()
    assert len(world.store.kept) == 1


def test_it_stops_with_the_worker(world):
    """The broker delivers to another worker what this one still has."""
    world.step.stop(world.worker)
    assert world.store.kept == ["closed"]


def test_a_worker_without_unique_tasks_does_not_step(plain_app, app):
    """Nor one of a task whose reservations end at a certain time, nor one that locks nothing."""
    app.conf.dislock_enabled = False
    assert not ReservationStep(SimpleNamespace(app=app)).include_if(SimpleNamespace(app=app))
    worker = SimpleNamespace(app=plain_app)

    @plain_app.task(base=SingletonTask, lock_unique_until="expiry", shared=False)
    def once(): ...

    assert once.name
    assert not ReservationStep(worker).include_if(worker)
