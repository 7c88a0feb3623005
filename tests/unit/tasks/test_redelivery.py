"""The same task twice: looked for, put off, and acknowledged unrun once it has succeeded."""

from __future__ import annotations

import pytest

from celery_dislock import SingletonTask, StoreError
from tests.unit.deliveries import Broker, deliver

LOCK = "dislock:{k}"


@pytest.fixture
def broker(app, world, monkeypatch):
    """Check that nobody holds the lock when a copy is sent."""

    class Checking(Broker):
        def __call__(self, name, *args, **options):
            super().__call__(name, *args, **options)
            held = [owner for owner, _, _ in world.store.leases.values()]
            assert not any(owner.startswith("1@w1:42/") for owner in held)

    broker = Checking()
    monkeypatch.setattr(app, "producer_or_acquire", broker.acquired)
    return broker


@pytest.fixture
def ran():
    return []


@pytest.fixture
def once(app, ran):
    @app.task(
        base=SingletonTask,
        lock_key="k",
        lock_dedupe_redelivered=True,
        lock_dedupe_for=600,
        bind=True,
    )
    def task(self):
        ran.append(self.request.retries)

    return task


def test_a_copy_after_the_success_is_acknowledged_unrun(app, world, once, ran):
    """The copy ends without a body and without touching the result; another task runs."""
    deliver(once, "1")
    assert deliver(once, "1").info.state == "IGNORED"
    assert app.AsyncResult("1").state == "SUCCESS"
    deliver(once, "2")
    assert ran == [0, 0]
    assert world.store.leases == {}


def test_the_mark_is_set_in_two_steps(app, world, once):
    """Before the release for as long as a lease, and after the result for lock_dedupe_for."""
    deliver(once, "1")
    steps = [call for call in world.store.calls if call[0] in {"remember", "release"}]
    assert steps == [
        ("remember", LOCK, "1", "ended 0", 30.0),
        ("release", LOCK, "1@w1:42/1", 0.0),
        ("remember", LOCK, "1", "done 0", 600.0),
    ]


def test_a_copy_of_a_success_that_is_not_over_is_put_off(app, world, once, ran, broker):
    """Callbacks and the result may still be lost with their process: the copy comes again."""
    world.store.marks[LOCK, "1"] = "ended 0"
    assert deliver(once, "1").info.state == "IGNORED"
    assert [sent["task_id"] for sent in broker.sent] == ["1"]
    assert ran == []
    assert world.store.leases == {}


def test_a_copy_of_work_that_is_done_frees_its_key(app, world, once, ran):
    """It has begun under the reservation of its message, and nothing else ends that."""
    world.store.marks[LOCK, "1"] = "done 0"
    deliver(once, "1", notes={"unique": [LOCK, "end"]})
    assert ran == []
    assert [call[0] for call in world.store.reservations.asked] == ["begin", "end"]


def test_a_retry_is_no_copy_of_the_attempt_before_it(app, world, once, ran):
    """A mark is about an attempt and those before it: a later one is new work."""
    deliver(once, "1")
    deliver(once, "1", retries=1)
    deliver(once, "1")
    assert ran == [0, 1]


def test_a_failure_leaves_no_mark(app, world):
    """Only what has succeeded needs not to run again."""

    @app.task(base=SingletonTask, lock_key="k", lock_dedupe_redelivered=True)
    def task():
        raise ValueError

    deliver(task)
    assert world.store.marks == {}


def test_a_success_that_cannot_be_remembered_is_a_success(app, world, once, ran, monkeypatch):
    """The server is gone when the body has ended: a copy may run, and the log says so."""
    remember = world.store.remember

    def away(*args):
        world.store.away = True
        remember(*args)

    monkeypatch.setattr(world.store, "remember", away)
    deliver(once, "1")
    assert app.AsyncResult("1").state == "SUCCESS"
    assert len([call for call in world.store.calls if call[0] == "remember"]) == 1


@pytest.mark.parametrize("may_run", [False, True])
def test_a_server_that_cannot_tell_of_copies(app, world, once, ran, broker, may_run):
    """What was acquired is released; the task is put off, or runs without its lock if it may."""
    app.conf.dislock_on_unavailable = "run" if may_run else "retry"

    def recall(*_):
        raise StoreError("redis://fake", "away")

    world.store.recall = recall
    deliver(once, "1")
    assert (len(broker.sent), ran) == ((0, [0]) if may_run else (1, []))
    assert (world.store.leases, world.store.marks) == ({}, {})


@pytest.mark.parametrize("options", [{"lock_mode": "shared"}, {"lock_limit": 2}])
@pytest.mark.parametrize(("other_id", "runs"), [("1", False), ("2", True)])
def test_a_lock_for_several_is_not_shared_with_a_copy(
    app, world, ran, broker, options, other_id, runs
):
    """Where a lock admits more than one, its holders are looked at for the same task id."""

    @app.task(base=SingletonTask, lock_key="k", **options)
    def task():
        ran.append(1)

    world.store.others = [("other", world.clock() + 30, {"id": other_id})]
    state = deliver(task, "1").info
    assert bool(ran) is runs
    assert state is None if runs else state.state == "IGNORED"
    assert [sent["task_id"] for sent in broker.sent] == ([] if runs else ["1"])
    assert world.store.leases == {}


@pytest.mark.parametrize("options", [{"lock_mode": "shared"}, {"lock_limit": 2}])
def test_what_another_delivery_has_left_to_run_out_is_no_copy(app, world, ran, broker, options):
    """One that was put off leaves its lease for lock_at_least_for: its task runs all the same."""

    @app.task(base=SingletonTask, lock_key="k", lock_at_least_for=12, **options)
    def task():
        ran.append(1)

    world.store.others = [("~1@w2:7/1", world.clock() + 12, {"id": "1"})]
    deliver(task, "1")
    assert (ran, broker.sent) == ([1], [])


def test_an_exclusive_lock_costs_no_look_at_its_holders(app, world):
    """Two round trips, as without all this."""

    @app.task(base=SingletonTask, lock_key="k")
    def task():
        pass

    deliver(task)
    assert [call[0] for call in world.store.calls] == ["acquire", "release"]


def test_eager_tasks_are_no_copies(app, world, once, ran):
    """apply() with the same id is the caller's own wish."""
    once.apply(task_id="1")
    assert world.store.marks == {}
    world.store.marks[LOCK, "1"] = "done 0"
    once.apply(task_id="1")
    assert ran == [0, 0]
