from __future__ import annotations

import threading

import pytest

from celery_dislock import signals
from celery_dislock.exceptions import LockLostError
from celery_dislock.locks.attempt import Conflict
from celery_dislock.servers.store import Ending
from tests.holding import Holding, name_of, wait_for

LONG = 60.0  # seconds: no lease of these tests runs out by itself
KEY = "export:7"


@pytest.fixture
def holding(redis_url):
    with Holding(redis_url) as holding:
        yield holding


@pytest.fixture
def others(redis_url):
    """Another process's locks on the same server."""
    with Holding(redis_url) as others:
        yield others


def take_over(holding, redis_client, key=KEY):
    """Take a lock away from its holder, as an operator's DEL and the next task do."""
    redis_client.delete(name_of(key))
    return holding.take(key, LONG)


class TestReleasing:
    def test_a_lease_that_is_left_runs_out(self, holding, others, redis_client):
        """It keeps the lock taken until its expiry, renews it no more, then it is free."""
        lease = holding.take(KEY, 1.0)
        lease.release(Ending(expires=True))
        assert not lease.held
        assert isinstance(others.try_take(KEY), Conflict)
        wait_for(lambda: not redis_client.keys("*"), "expiry of the lease that was left")
        assert lease.renewals == 0
        (event,) = holding.named("lock_released", lease)
        assert event.arguments == {"lease": lease, "expiring": True}
        assert holding.named("lock_lost") == []


class TestSignals:
    def test_the_life_of_a_lease(self, holding):
        """Acquired, renewed, released: in that order, with the documented arguments, and held."""
        lease = holding.take(KEY, 1.5)
        holding.wait_renewed(lease)
        lease.release()
        names = [event.name for event in holding.events]
        assert names == ["lock_acquired", *["lock_renewed"] * (len(names) - 2), "lock_released"]
        assert len(names) >= 3
        assert [event.arguments for event in holding.events[:-1]] == [{"lease": lease}] * (
            len(names) - 1
        )
        assert holding.events[-1].arguments == {"lease": lease, "expiring": False}
        assert [event.held for event in holding.events] == [True] * (len(names) - 1) + [False]


class TestLosing:
    def test_a_deleted_lock_is_lost(self, holding, redis_client):
        """When the key is deleted the holder is told at its next renewal, and is held no more."""
        lease = holding.take(KEY, 1.5)
        redis_client.delete(name_of(KEY))
        holding.wait_lost(lease)
        assert not lease.held
        assert lease.remaining == 0
        with pytest.raises(LockLostError, match="no longer has it"):
            lease.ensure_held()

    def test_a_lock_that_was_taken_over_is_lost(self, holding, others, redis_client):
        """The old holder is told; the new one keeps its lease, and has the greater token."""
        lease = holding.take(KEY, 1.5)
        new = take_over(others, redis_client)
        before = redis_client.hgetall(name_of(KEY))
        holding.wait_lost(lease)
        assert redis_client.hgetall(name_of(KEY)) == before
        assert new.held
        assert new.token > lease.token
        assert others.named("lock_lost") == []

    def test_a_receiver_that_exits_does_not_keep_the_body_running(self, holding, redis_client):
        """Even when a receiver of lock_lost raises SystemExit, the task's lock_on_lost is done."""

        def bad(**kwargs):
            raise SystemExit(3)

        done = threading.Event()
        lease = holding.take(KEY, 0.6, lock_on_lost="raise")
        lease.on_end = lambda *_: done.set()
        signals.lock_lost.connect(bad, sender=holding.sender, weak=False)
        try:
            redis_client.delete(name_of(KEY))
            wait_for(lambda: holding.watchdog.errors or done.is_set(), "the loss")
            assert done.wait(5), "lock_on_lost was skipped"
        finally:
            signals.lock_lost.disconnect(bad, sender=holding.sender)
