"""A lock on a store that the test drives: how it is taken."""

from __future__ import annotations

import pytest

from celery_dislock.exceptions import StoreError
from celery_dislock.locks.attempt import Attempt, Conflict
from celery_dislock.servers.replies import Refused

HOLDER = {"task": "shop.export", "id": "1", "worker": "w1", "pid": 7}


def test_the_second_owner_meets_a_conflict_that_names_the_first(world):
    """A refusal says who holds the lock, and for how much longer."""
    world.lock().try_acquire(Attempt("a", HOLDER))
    world.clock.advance(10)
    conflict = world.lock().try_acquire(Attempt("b", {}))
    assert isinstance(conflict, Conflict)
    assert conflict.remaining == pytest.approx(20)
    error = conflict.error()
    assert error.key == "k"
    assert error.holder == "shop.export[1] on w1 (pid 7)"


def test_uncontended_acquire_and_release_are_one_round_trip_each(world):
    """Two calls to the store, no more."""
    world.lease().release()
    assert [call[0] for call in world.store.calls] == ["acquire", "release"]


def test_an_answer_that_comes_too_late_is_no_lease(world):
    """Granted after trust would have ended: given back, and treated as no answer."""
    world.store.latency = 31
    with pytest.raises(StoreError, match="too late"):
        world.lease(lock_watchdog_timeout=30)
    assert world.store.leases == {}


def test_a_conflict_says_for_how_long_the_lock_has_been_held(world):
    """As the server has told."""
    refused = Refused("other", 29.0, HOLDER, 0, 2, 720.0, 1.0)
    assert world.lock().conflict(refused) == Conflict("k", HOLDER, 29.0, 2, 720.0, 1.0)
