"""An attempt, and a conflict."""

from __future__ import annotations

import pytest

from celery_dislock.locks.attempt import Attempt, Conflict

HOLDER = {"task": "shop.export", "id": "1", "worker": "w1", "pid": 7}


def test_an_attempt_knows_its_lease_before_anything_keeps_it_alive(world):
    """Whatever interrupts the acquisition, a lease that is renewed can be ended."""
    attempt = Attempt("a", HOLDER)

    def interrupted(lease):
        assert attempt.lease is lease
        raise KeyboardInterrupt

    world.watchdog.watch = interrupted
    with pytest.raises(KeyboardInterrupt):
        world.lock().try_acquire(attempt)
    attempt.end()
    assert world.store.leases == {}


def test_an_error_says_what_the_conflict_knows():
    """Key, holder, what is left, and for how long it has been held."""
    error = Conflict("k", HOLDER, 28.4, 0, 720.0, 3.1).error()
    assert str(error) == (
        "lock 'k' is held by shop.export[1] on w1 (pid 7), for 12 min so far, last renewed 3.1 s "
        "ago, for 28.4 s more unless renewed"
    )
    assert (error.held_for, error.renewed) == (720.0, 3.1)
