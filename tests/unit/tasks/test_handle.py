"""A lock from outside, in Python: ``Dislock.lock_of(key)``."""

from __future__ import annotations

import pytest

from celery_dislock import Dislock
from celery_dislock.keys.names import reserved_lock
from tests.staged import RESERVED, Staged, holder, lock, make_app, place, reach


@pytest.fixture
def server(monkeypatch):
    server = Staged()
    reach(monkeypatch, server)
    monkeypatch.setattr("celery_dislock.tasks.actions.LOOK_EVERY", 0.0)
    return server


@pytest.fixture
def told():
    """The tasks that the workers were told to end."""
    return []


@pytest.fixture
def make(server, told, monkeypatch):
    app = make_app(server)
    monkeypatch.setattr(app.control, "revoke", lambda task_id, **_: told.append(task_id))
    return Dislock(app).lock_of


@pytest.fixture
def left(server):
    """What there is of the lock: owners of leases, and id of the reservation."""

    def left():
        found = server.overview.lock("dislock:{k}")
        return [one.owner for one in found.holders], found.reservation and found.reservation.id

    return left


OWNER = holder().owner


def test_it_is_named_by_its_keys(make):
    """One or several; each of several has a handle of its own."""
    handle = make(["a", "b"])
    assert (handle.key, handle.keys, len(handle)) == ("a + b", ("a", "b"), 2)
    assert [one.keys for one in handle] == [("a",), ("b",)]
    assert repr(make("a")) == "<LockHandle 'a'>"


def test_holders_and_line_are_those_of_each_key_in_turn(make, server):
    """Several keys are asked one after the other."""
    server.put(
        lock("a", holders=[holder(owner="1")], waiting=3, line=[place(1), place(2), place(3)]),
        lock("b", holders=[holder(owner="2")], waiting=1, line=[place(4)]),
    )
    handle = make(["a", "b"])
    assert [one.owner for one in handle.holders()] == ["1", "2"]
    assert [one.id for one in handle.line(2)] == ["parked-1", "parked-2", "parked-4"]


def test_leases_are_freed_and_then_the_reservation_is_ended(make, server, left):
    """Those that are there now; then nothing is left, and nothing is told."""
    server.put(lock(holders=[holder(), holder(2)], reservation=RESERVED))
    *leases, reservation = make("k").free()
    assert ({one.id for one in leases}, reservation.id) == ({"id-1", "id-2"}, "id-9")
    assert (make("k").free(), left()) == ([], ([], None))


@pytest.mark.parametrize(
    ("given", "is_told", "freed"),
    [
        ({}, True, []),  # it may live, and another message is not wanted before its end
        ({"renewed": 21.0, "remaining": 9.0}, True, ["id-1", "id-9"]),
        ({"turn": True}, False, ["id-1", "id-9"]),
        ({"expiring": True}, False, ["id-1", "id-9"]),
    ],
)
def test_a_task_is_terminated_first(make, server, told, given, is_told, freed):
    """It may end with that; what may live is not freed, and what runs no body is at once."""
    server.put(lock(holders=[holder(**given)], reservation=RESERVED))
    found = make("k").free(terminate=True, wait=0.001)
    assert ([one.id for one in found], told) == (freed, ["id-1"] * is_told)


@pytest.mark.parametrize(
    ("shown", "is_left"),
    [
        (RESERVED._replace(since=9.0), ([OWNER], None)),
        (RESERVED._replace(number=6), ([OWNER], "id-9")),
        (RESERVED._replace(mark="other"), ([OWNER], "id-9")),
        (RESERVED._replace(id="id-2"), ([OWNER], "id-9")),
        (holder(), ([], "id-9")),
        (holder(token=2), ([OWNER], "id-9")),
    ],
)
def test_what_was_shown_is_ended_alone(make, server, left, shown, is_left):
    """A lease or a reservation, if it is the same still."""
    server.put(lock(holders=[holder()], reservation=RESERVED))
    make("k").free(shown)
    assert left() == is_left


def test_keys_that_are_reserved_together_are_freed(make, server):
    """Their reservation has a name of its own."""
    name = reserved_lock(["dislock:{a}", "dislock:{b}"])
    server.put(lock("a and others", name=name, reservation=RESERVED))
    assert [one.key for one in make(["a", "b"]).state()] == ["a", "b", "a and others"]
    assert [one.id for one in make(["a", "b"]).free()] == ["id-9"]
    assert len(make(["a", "b"]).state()) == 2
