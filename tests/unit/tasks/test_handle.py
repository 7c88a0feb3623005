"""A lock from outside, in Python."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from celery_dislock.keys.names import reserved_lock
from celery_dislock.tasks import handle as module
from celery_dislock.tasks.handle import LockHandle
from tests.unit.operating.cli.conftest import (
    FakeActions,
    FakeOverview,
    holder,
    lock,
    place,
    reserved,
)

ENDED = ("id-1", "5eed", 7)  # the reservation
FREED = ("free", "dislock:{k}", holder().owner, 5)


@pytest.fixture
def actions(monkeypatch):
    actions = FakeActions()
    monkeypatch.setattr(module, "Actions", lambda _app, _process: actions)
    return actions


@pytest.fixture
def overview(monkeypatch):
    overview = FakeOverview()
    monkeypatch.setattr(module, "Overview", lambda _server, _prefix: overview)
    return overview


@pytest.fixture
def make(actions, overview):
    runtime = SimpleNamespace(
        lock_names=lambda keys: tuple(f"dislock:{{{key}}}" for key in keys),
        process=SimpleNamespace(store=SimpleNamespace(lock_server=None)),
        settings=SimpleNamespace(dislock_prefix="dislock"),
    )
    return lambda *keys: LockHandle(keys, runtime, None)


def test_it_is_named_by_its_keys(make):
    """One or several; each of several has a handle of its own."""
    handle = make("a", "b")
    assert (handle.key, handle.keys, len(handle)) == ("a + b", ("a", "b"), 2)
    assert [one.keys for one in handle] == [("a",), ("b",)]
    assert repr(make("a")) == "<LockHandle 'a'>"


def test_holders_and_line_are_those_of_each_key_in_turn(make, overview):
    """Several keys are asked one after the other."""
    overview.put(
        lock("a", holders=[holder(owner="1")], line=[place(1)]),
        lock("b", holders=[holder(owner="2")], line=[place(2)]),
    )
    handle = make("a", "b")
    assert [one.owner for one in handle.holders()] == ["1", "2"]
    assert [one.place for one in handle.line(5)] == [1, 2]
    assert overview.asked[-3:-1] == [("dislock:{a}", 0, 5), ("dislock:{b}", 0, 5)]


def test_all_leases_are_freed(make, overview, actions):
    """Those that are there now; what has ended meanwhile is missing in the answer."""
    overview.put(lock("k", holders=[holder(), holder(owner="other", token=6)]))
    assert len(make("k").free()) == 2
    assert actions.done == [FREED, ("free", "dislock:{k}", "other", 6)]
    actions.answer = False
    assert make("k").free() == []


@pytest.mark.parametrize(
    ("left", "freed", "done"),
    [
        (None, True, []),
        (holder(), False, []),
        (holder(renewed=21.0, remaining=9.0), True, [FREED]),
    ],
)
def test_a_task_is_terminated_first(make, overview, actions, left, freed, done):
    """It may end with that; what may live is not freed."""
    overview.put(lock("k", holders=[holder()]))
    actions.left = left
    assert bool(make("k").free(terminate=True, wait=5.0)) is freed
    assert actions.done == [("terminate", "9b1d", "TERM"), ("wait", "dislock:{k}", 5.0), *done]


UNRESERVED = ("unreserve", "dislock:{k}", *ENDED)


def test_a_reservation_is_ended_and_told(make, overview, actions):
    """After the leases; one that has ended meanwhile is missing in the answer."""
    overview.put(lock("k", holders=[holder()], reservation=reserved()))
    assert make("k").free() == [holder(), reserved()]
    assert actions.done == [FREED, UNRESERVED]
    actions.answer = False
    assert make("k").free() == []


@pytest.mark.parametrize(
    ("shown", "done"),
    [
        (reserved(since=9.0), [UNRESERVED]),
        (reserved(number=6), []),
        (reserved(mark="other"), []),
        (reserved(id="id-2"), []),
        (holder(), [FREED]),
    ],
)
def test_what_was_shown_is_ended_alone(make, overview, actions, shown, done):
    """A lease or a reservation, if it is the same still."""
    overview.put(lock("k", holders=[holder()], reservation=reserved()))
    make("k").free(shown)
    assert actions.done == done


def test_a_reservation_stays_beside_a_task_that_still_runs(make, overview, actions):
    """Who wants the task to end first does not want another message before that."""
    overview.put(lock("k", holders=[holder()], reservation=reserved()))
    actions.left = holder()
    assert make("k").free(terminate=True) == []
    assert UNRESERVED not in actions.done


def test_keys_that_are_reserved_together_are_freed(make, overview, actions):
    """Their reservation has a name of its own."""
    name = reserved_lock(["dislock:{a}", "dislock:{b}"])
    overview.put(lock("a and others", name=name, reservation=reserved()))
    assert [one.key for one in make("a", "b").state()] == ["a", "b", "a and others"]
    assert make("a", "b").free() == [reserved()]
    assert actions.done == [("unreserve", name, *ENDED)]


def test_what_runs_no_body_is_freed_at_once(make, overview, actions):
    """A turn, or a lease that only runs out."""
    overview.put(lock("k", holders=[holder(turn=True)]))
    assert len(make("k").free(terminate=True)) == 1
    assert actions.done == [FREED]
