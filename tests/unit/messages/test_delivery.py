"""One delivery of a task, as an object."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from celery.app.task import Context

from celery_dislock.locks.attempt import Attempt
from celery_dislock.messages.delivery import Delivery
from celery_dislock.messages.headers import PUT_OFF_HEADER, Notes
from celery_dislock.servers.requests import Ending


@pytest.fixture
def request_():
    """Celery's, which Celery keeps."""
    return Context({"id": "1", "headers": {PUT_OFF_HEADER: 3, "tenant": 7}})


@pytest.fixture
def delivery(world, request_):
    notes = Notes.of(request_, "dislock")
    lock = world.lock()
    attempt = Attempt("me", {"task": "t", "id": "1"})
    lock.try_acquire(attempt)
    return Delivery(SimpleNamespace(name="t"), request_, lock, attempt, notes)


def test_it_is_found_by_its_request(delivery, request_):
    """Nothing of ours hangs on a request that no guard has seen."""
    assert Delivery.of(request_) is None
    request_.dislock = delivery
    assert Delivery.of(request_) is delivery


def test_its_notes_are_forgotten_with_their_headers(delivery):
    """What its body sends knows nothing of the wait for this lock."""
    assert delivery.notes.put_off == 3
    delivery.forget_notes()
    assert delivery.notes == Notes()
    assert delivery.request.headers == {"tenant": 7}


def test_its_lease_ends_once_as_the_guard_has_decided(delivery, world):
    """Until the body has ended: released, with nothing said about the line."""
    assert delivery.ending == Ending()
    delivery.ending = Ending(expires=True, at_least=100.0, ticket="1:0:0", settles=30.0)
    delivery.settle()
    delivery.settle()
    assert (world.store.done, world.store.settling) == (["1:0:0"], [30.0])
    [(owner, expires, _)] = world.store.leases.values()
    assert owner == "~me"
    assert expires - world.clock.now == pytest.approx(100.0)
