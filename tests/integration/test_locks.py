from __future__ import annotations

import logging
import threading
import time

import pytest

from celery_dislock import signals
from celery_dislock.exceptions import LockHeldError, LockLostError, StoreError
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

    def test_the_second_is_told_who_holds_the_lock(self, holding, others):
        """A conflict carries key, holder and remaining seconds, and makes the error of them."""
        lease = holding.take(KEY, LONG)
        conflict = others.try_take(KEY, LONG)
        assert isinstance(conflict, Conflict)
        assert conflict.key == KEY
        assert conflict.holder == lease.holder
        assert 0 < conflict.remaining <= LONG
        error = conflict.error()
        assert isinstance(error, LockHeldError)
        assert lease.holder["id"] in str(error)

    def test_trust_ends_before_the_server_ends_the_lease(self, holding, redis_client):
        """The local deadline comes before the expiry in Redis, by a margin."""
        lease = holding.take(KEY, LONG)
        remaining = lease.remaining
        assert remaining < redis_client.pttl(name_of(KEY)) / 1000

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

    def test_a_server_that_is_away_refuses_to_grant(self, own_redis_server):
        """Without an answer there is no lease: StoreError, and no signal."""
        with Holding(own_redis_server.url) as holding:
            own_redis_server.kill()
            with pytest.raises(StoreError):
                holding.try_take(KEY)
            assert holding.events == []


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

    def test_only_the_first_release_counts(self, holding, others):
        """Releasing again asks nobody, sends no signal, and leaves the next holder alone."""
        lease = holding.take(KEY, LONG)
        for _ in range(3):
            lease.release()
        other = others.take(KEY)
        lease.release()
        lease.release(Ending(expires=True))
        assert isinstance(holding.try_take(KEY), Conflict)
        assert other.held
        assert len(holding.named("lock_released", lease)) == 1

    def test_a_lease_that_is_left_runs_out(self, holding, others, redis_client):
        """leave() keeps the lock taken until its expiry, renews it no more, then it is free."""
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

    def test_at_least_for_that_has_passed_holds_nothing(self, holding, others):
        """When the task ran longer than lock_at_least_for, the release frees the lock at once."""
        lease = holding.take(KEY, LONG, lock_at_least_for=0.01)
        time.sleep(0.02)
        lease.release()
        others.take(KEY)

    def test_a_lease_that_is_left_can_be_kept_longer_only(self, holding, redis_client):
        """leave() with a shorter lock_at_least_for does not shorten the lease."""
        lease = holding.take(KEY, LONG, lock_at_least_for=0.01)
        lease.release(Ending(expires=True))
        assert redis_client.pttl(name_of(KEY)) > LONG * 500

    def test_a_lease_that_is_left_is_kept_for_at_least(self, holding, redis_client):
        """leave() with a longer lock_at_least_for holds the lock for that."""
        lease = holding.take(KEY, 1.0, lock_at_least_for=LONG)
        lease.release(Ending(expires=True))
        assert redis_client.pttl(name_of(KEY)) > LONG * 500

    def test_a_server_that_is_away_does_not_raise(self, own_redis_server, caplog):
        """A release that cannot be sent is logged with the key and when the lock ends by itself."""
        with Holding(own_redis_server.url) as holding:
            lease = holding.take(KEY, LONG)
            own_redis_server.kill()
            with caplog.at_level(logging.WARNING, "celery_dislock"):
                lease.release()
            assert not lease.held
            assert f"{KEY!r}" in caplog.text
            assert "ends by itself within 60.0 s" in caplog.text
            assert holding.named("lock_lost") == []

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
        """Acquired, renewed, released: in that order, with the documented arguments."""
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

    def test_the_lease_is_held_when_it_is_announced(self, holding):
        """A receiver of lock_acquired or lock_renewed sees a lease that is held."""
        lease = holding.take(KEY, 1.5)
        holding.wait_renewed(lease)
        wait_for(lambda: holding.named("lock_renewed"))
        lease.release()
        for event in holding.events:
            assert event.held == (event.name != "lock_released")

    def test_a_loss_comes_with_its_reason(self, holding, redis_client):
        """lock_lost carries the lease, which is held no more, and the reason in words."""
        lease = holding.take(KEY, 1.5)
        redis_client.delete(name_of(KEY))
        event = holding.wait_lost(lease)
        assert set(event.arguments) == {"lease", "reason"}
        assert "no longer has it" in event.arguments["reason"]
        assert not event.held

    def test_the_cap_is_announced(self, holding):
        """lock_capped carries the lease, once."""
        lease = holding.take(KEY, 0.6, max_renew_times=1)
        wait_for(lambda: holding.named("lock_capped", lease), "the cap")
        (event,) = holding.named("lock_capped")
        assert event.arguments == {"lease": lease}

    @pytest.mark.parametrize("name", ["lock_acquired", "lock_released"])
    def test_a_receiver_that_raises_harms_nothing(self, holding, others, name):
        """Taking and releasing a lock go on whatever a receiver raises."""
        calls = []

        def bad(**kwargs):
            calls.append(kwargs)
            raise ValueError("a receiver's mistake")

        getattr(signals, name).connect(bad, sender=holding.sender, weak=False)
        try:
            lease = holding.take(KEY, LONG)
            assert lease.held
            lease.release()
        finally:
            getattr(signals, name).disconnect(bad, sender=holding.sender)
        assert len(calls) == 1
        others.take(KEY)


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

    def test_it_is_reported_once(self, holding, redis_client):
        """The release after a loss sends neither a second lock_lost nor a lock_released."""
        lease = holding.take(KEY, 0.6)
        redis_client.delete(name_of(KEY))
        holding.wait_lost(lease)
        lease.release()
        lease.release(Ending(expires=True))
        assert len(holding.named("lock_lost")) == 1
        assert holding.named("lock_released") == []

    def test_a_lost_lease_is_not_brought_back_by_its_release(self, holding, redis_client):
        """Releasing a lost lease with lock_at_least_for writes nothing to Redis."""
        lease = holding.take(KEY, 0.6, lock_at_least_for=LONG)
        redis_client.delete(name_of(KEY))
        holding.wait_lost(lease)
        lease.release()
        assert redis_client.keys("*") == []

    def test_a_release_of_a_lease_that_is_gone_though_trusted_reports_the_loss(
        self, holding, redis_client
    ):
        """No reply was lost: somebody else has ended it, and another may have held the lock."""
        lease = holding.take(KEY, LONG)
        redis_client.delete(name_of(KEY))
        lease.release()
        assert len(holding.named("lock_lost", lease)) == 1
        assert holding.named("lock_released") == []

    def test_a_fixed_expiry_that_runs_out_under_the_body_is_reported(self, holding, redis_client):
        """With lock_expire nothing is renewed; when the time is over the lease is lost, once."""
        lease = holding.take(KEY, LONG, lock_expire=0.6)
        event = holding.wait_lost(lease)
        assert "0.6 s" in event.arguments["reason"]
        assert lease.renewals == 0
        assert not lease.held
        wait_for(lambda: not redis_client.keys("*"), "expiry")
        lease.release()
        assert len(holding.named("lock_lost")) == 1

    def test_a_fixed_expiry_that_is_not_reached_is_released(self, holding, redis_client):
        """With lock_expire a task that ends in time releases as any other."""
        lease = holding.take(KEY, 0.6, lock_expire=LONG)
        lease.release()
        assert redis_client.keys("*") == []
        assert holding.named("lock_lost") == []

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
