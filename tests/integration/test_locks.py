from __future__ import annotations

import threading

import pytest

from celery_dislock import signals
from celery_dislock.exceptions import LockLostError
from celery_dislock.locks.attempt import Conflict
from celery_dislock.locks.lease import Lease
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


class TestTaking:
    def test_a_lease_knows_its_key_owner_token_and_time(self, holding, redis_client):
        """A new lease is held, was never renewed, and its token is the one in Redis."""
        attempt = holding.attempt()
        lease = holding.lock(KEY, LONG).try_acquire(attempt)
        assert (lease.key, lease.owner, lease.renewals, lease.held) == (KEY, attempt.owner, 0, True)
        assert str(lease.token) in redis_client.hget(name_of(KEY), attempt.owner)
        assert 0 < lease.remaining < LONG
        lease.ensure_held()
        assert attempt.lease is lease

    def test_an_attempt_made_again_gets_the_same_token(self, holding):
        """An owner that asks again has the lease it had."""
        first = holding.take(KEY, LONG)
        attempt = holding.attempt(first.owner)
        again = holding.lock(KEY, LONG).try_acquire(attempt)
        assert isinstance(again, Lease)
        assert again.token == first.token

    def test_an_abandoned_attempt_leaves_nothing(self, holding, others, redis_client):
        """What an interrupted acquisition may have taken is given back by abandon()."""
        attempt = holding.attempt()
        lock = holding.lock(KEY, LONG)
        holding.store.acquire(lock.names, attempt.owner, LONG, "{}")
        lock.abandon(attempt)
        assert redis_client.keys("*") == []
        lock.abandon(attempt)
        others.take(KEY)

    def test_the_token_grows_over_hand_overs(self, holding, others):
        """Whoever takes the lock after another has the greater token."""
        tokens = []
        for turn in range(20):
            lease = (holding, others)[turn % 2].take(KEY, LONG)
            tokens.append(lease.token)
            lease.release()
        assert sorted(set(tokens)) == tokens


class TestReleasing:
    def test_a_released_lock_is_free_and_leaves_nothing(self, holding, others, redis_client):
        """After a release the lease is held no more, Redis is empty, the next one gets the lock."""
        lease = holding.take(KEY, LONG)
        lease.release()
        assert not lease.held
        assert lease.remaining == 0
        with pytest.raises(LockLostError, match="released"):
            lease.ensure_held()
        assert redis_client.keys("*") == []
        others.take(KEY)

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

    def test_at_least_for_holds_on_after_the_release(self, holding, others, redis_client):
        """lock_at_least_for counts from the acquisition, also past the lease's own timeout."""
        lease = holding.take(KEY, 1.0, lock_at_least_for=LONG)
        lease.release()
        assert not lease.held
        conflict = others.try_take(KEY)
        assert isinstance(conflict, Conflict)
        assert LONG / 2 < conflict.remaining <= LONG
        assert holding.named("lock_lost") == []
        assert len(holding.named("lock_released", lease)) == 1

    @pytest.mark.parametrize(("timeout", "at_least_for"), [(1.0, LONG), (LONG, 0.01)])
    def test_a_lease_that_is_left_lasts_as_long_as_it_may(
        self, holding, redis_client, timeout, at_least_for
    ):
        """The longer of its timeout and lock_at_least_for decides."""
        lease = holding.take(KEY, timeout, lock_at_least_for=at_least_for)
        lease.release(Ending(expires=True))
        assert redis_client.pttl(name_of(KEY)) > LONG * 500

    def test_a_release_after_the_lock_was_taken_away_leaves_the_new_holder_alone(
        self, holding, others, redis_client
    ):
        """The old owner's release, and its lock_at_least_for, change nothing for the new one."""
        lease = holding.take(KEY, LONG, lock_at_least_for=10 * LONG)
        new = take_over(others, redis_client)
        before = redis_client.hgetall(name_of(KEY))
        lease.release()
        assert redis_client.hgetall(name_of(KEY)) == before
        assert redis_client.pttl(name_of(KEY)) <= LONG * 1000
        assert new.held


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

    def test_a_lost_lease_is_not_brought_back_by_its_release(self, holding, redis_client):
        """Releasing a lost lease with lock_at_least_for writes nothing to Redis."""
        lease = holding.take(KEY, 0.6, lock_at_least_for=LONG)
        redis_client.delete(name_of(KEY))
        holding.wait_lost(lease)
        lease.release()
        assert redis_client.keys("*") == []

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
