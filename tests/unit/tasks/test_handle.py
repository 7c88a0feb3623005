"""A lock from outside, in Python: who has it, who waits, and what ends that."""

import pytest
from greenlet import getcurrent, greenlet

from celery_dislock import Dislock, SettingsError
from celery_dislock.tasks.actions import BrokerError
from tests.declaring import declare, never
from tests.driven import held, reservation
from tests.leaks import SECRET
from tests.unit.deliveries import deliver


@pytest.fixture
def lock_of(app):
    """Return the lock of some keys, as an operator has it."""
    return lambda *keys: declare(app, name=f"looked at by {keys}", lock_key=list(keys)).lock_for()


@pytest.fixture
def runs(app, monkeypatch):
    """A task that runs, and what its worker is told; *ends* seconds after a revoke."""
    told, workers = [], []

    def waits():
        getcurrent().parent.switch()

    def start(ends=None, **options):
        worker = greenlet(deliver)
        workers.append(worker)
        worker.switch(declare(app, waits, name="runs", **options), "1")

        def broadcast(command, arguments, **_):
            told.append(
                (command, arguments["task_id"], arguments["terminate"], arguments["signal"])
            )
            if ends is not None:
                app.lock_server.after(ends, worker.switch)

        monkeypatch.setattr(app.control, "broadcast", broadcast)
        return told

    yield start
    for worker in workers:
        if not worker.dead:
            worker.switch()


@pytest.fixture
def app(app, lock_server):
    app.lock_server = lock_server
    return app


def test_it_is_named_by_its_keys(lock_of):
    """One or several; each of several has a handle of its own."""
    handle = lock_of("a", "b")
    assert (handle.key, handle.keys, len(handle)) == ("a + b", ("a", "b"), 2)
    assert [one.keys for one in handle] == [("a",), ("b",)]
    assert repr(lock_of("a")) == "<LockHandle 'a'>"


def test_holders_and_line_are_those_of_each_key_in_turn(app, lock_of):
    """Several keys are asked one after the other; only so many places are shown."""
    with held(app, "a", "1"), held(app, "b", "2"):
        for key, task_id in (("a", "3"), ("b", "4"), ("b", "5")):
            parks = declare(app, name=f"parks for {key}", lock_key=key, lock_on_conflict="queue")
            deliver(parks, task_id)
        handle = lock_of("a", "b")
        assert [one.id for one in handle.holders()] == ["1", "2"]
        assert [one.id for one in handle.line()] == ["3", "4", "5"]
        assert [one.id for one in handle.line(1)] == ["3", "4"]


def test_what_was_shown_is_ended_alone(app, lock_of, lock_server):
    """A lease or a reservation, if it is the same still; without one all that are there."""
    task = declare(app, lock_unique_until="end")
    task.apply_async(task_id="sent")
    with held(app, "k", "1", lock_limit=2), held(app, "k", "2", lock_limit=2):
        [first, second] = lock_of("k").holders()
        message = reservation(task)
        assert lock_of("k").free(first) == [first]
        assert lock_of("k").free(first) == []
        assert lock_of("k").holders() == [second]
        assert lock_of("k").free(message) == [message]
        task.apply_async(task_id="sent")  # under the same id, which somebody uses for all
        assert lock_of("k").free(message) == []
        assert [one.id for one in lock_of("k").free()] == [second.id, "sent"]
        assert lock_server.locks() == []
        assert lock_of("k").free() == []


@pytest.mark.parametrize(
    ("ends", "stalls", "freed"), [(3.0, 0, True), (None, 0, False), (None, 29, False)]
)
def test_a_task_is_terminated_first(app, lock_of, lock_server, runs, ends, stalls, freed):
    """It may end with that; what may live keeps its lock and its reservation."""
    told = runs(ends, lock_unique_until="end")
    task = app.tasks["runs"]
    task.apply_async(task_id="next")
    lock_server.stall(stalls)
    wait = 0.0 if stalls else 5.0
    ended = [one.id for one in lock_of("k").free(terminate=True, wait=wait)]
    assert told == [("revoke", "1", True, "TERM")]
    assert ended == (["1", "next"] if freed else [])
    assert bool(lock_server.locks()) is not freed
    assert (reservation(task) is None) is freed


def test_a_thread_keeps_its_lock_as_it_cannot_be_terminated(app, lock_of):
    """Whoever came next would run beside it."""
    with Dislock(app).lock("k"):
        assert lock_of("k").free(terminate=True) == []
        assert len(lock_of("k").holders()) == 1


def test_a_turn_is_freed_at_once(app, lock_of, broker):
    """It runs no body that could be terminated; the task in line has another one."""
    parks = declare(app, never, lock_on_conflict="queue")
    with held(app):
        deliver(parks, "2")
    [turn] = lock_of("k").free(terminate=True)
    assert (turn.id, turn.turn) == ("2", True)
    assert lock_of("k").free(turn) == []


@pytest.mark.parametrize("keys", [["a", "b"], lambda: ("b", "a")], ids=["list", "callable"])
def test_keys_that_are_reserved_together_are_freed(app, lock_of, broker, keys):
    """Their reservation has a name of its own, and counts for a second message."""
    task = declare(app, lambda: None, lock_key=keys, lock_unique_until="start")
    task.apply_async(task_id="id-1")
    assert task.delay().id == "id-1"
    assert [one.key for one in lock_of("a", "b").state()] == ["a", "b", "a and others"]
    assert [one.id for one in lock_of("a", "b").free()] == ["id-1"]
    assert reservation(task) is None


def test_who_cannot_be_told_is_an_error(app, lock_of, runs, monkeypatch):
    """Without workers, or with a broker that is away, whose error may have its password."""
    runs()
    error = ConnectionRefusedError(111, "Connection refused", f"redis://:{SECRET}@h")

    def away(*_, **__):
        raise error

    monkeypatch.setattr(app.control, "broadcast", away)
    with pytest.raises(BrokerError, match="refused") as told:
        lock_of("k").free(terminate=True)
    assert SECRET not in str(told.value)
    assert told.value.__cause__ is None
    with pytest.raises(SettingsError, match="there are no workers to be told"):
        Dislock.from_url("redis://driven").lock_of("k").free(terminate=True)
