"""A lock and its leases, on a store that the test drives."""

from __future__ import annotations

import pytest

from celery_dislock import signals
from celery_dislock.exceptions import (
    ForbiddenError,
    LockLostError,
    StoreError,
    UnreachableError,
)
from celery_dislock.locks.claim import Claim, Conflict, in_words
from celery_dislock.locks.lease import Lease

HOLDER = {"task": "shop.export", "id": "1", "worker": "w1", "pid": 7}


def names(events):
    return [name for name, _ in events]


def test_the_second_owner_meets_a_conflict_that_names_the_first(world):
    """A refusal says who holds the lock, and for how much longer."""
    world.lock().try_acquire(Claim("a", HOLDER))
    world.clock.advance(10)
    conflict = world.lock().try_acquire(Claim("b", {}))
    assert isinstance(conflict, Conflict)
    assert conflict.remaining == pytest.approx(20)
    error = conflict.error()
    assert error.key == "k"
    assert error.holder == "shop.export[1] on w1 (pid 7)"


def test_a_conflict_is_false_and_a_lease_is_true(world):
    """``if lock.try_acquire():`` enters only where the lock was got."""
    assert world.lock().try_acquire(Claim("a", HOLDER))
    assert not world.lock().try_acquire(Claim("b", HOLDER))


def test_a_claim_knows_its_lease_before_anything_keeps_it_alive(world):
    """Whatever interrupts the acquisition, a lease that is renewed can be settled."""
    claim = Claim("a", HOLDER)

    def interrupted(lease):
        assert claim.lease is lease
        raise KeyboardInterrupt

    world.watchdog.watch = interrupted
    with pytest.raises(KeyboardInterrupt):
        world.lock().try_acquire(claim)
    claim.settle()
    assert world.store.leases == {}


def test_uncontended_acquire_and_release_are_one_round_trip_each(world):
    """Two calls to the store, no more."""
    world.lease().release()
    assert [call[0] for call in world.store.calls] == ["acquire", "release"]


def test_a_released_lease_is_held_no_more(world, heard):
    """Release ends trust at once, and says so once, however often it is called."""
    lease = world.lease()
    lease.release()
    lease.release()
    assert not lease.held
    assert lease.remaining == 0
    assert names(heard) == ["lock_acquired", "lock_released"]
    with pytest.raises(LockLostError, match="released"):
        lease.ensure_held()


def test_a_release_that_was_interrupted_is_done_when_asked_again(world):
    """An exception in the middle of a release leaves the rest to the safety net."""
    lease = world.lease()
    release, world.store.release = world.store.release, lambda *_: (_ for _ in ()).throw(SystemExit)
    with pytest.raises(SystemExit):
        lease.release()
    world.store.release = release
    lease.release()
    assert world.store.leases == {}
    assert len(world.watchdog) == 0


def test_a_release_that_was_cut_short_after_it_was_sent_is_a_release(world, heard):
    """A lease that the second try finds gone was released by the first."""
    lease = world.lease()
    release = world.store.release

    def cut_short(*args):
        release(*args)
        raise SystemExit

    world.store.release = cut_short
    with pytest.raises(SystemExit):
        lease.release()
    world.store.release = release
    lease.release()
    assert names(heard) == ["lock_acquired", "lock_released"]


def test_a_lease_that_is_gone_at_its_release_was_lost(world, heard):
    """Trusted or not: where no reply of this release was lost, somebody else has ended it."""
    lease = world.lease()
    world.store.leases.clear()
    lease.release()
    assert lease.lost
    assert names(heard) == ["lock_acquired", "lock_lost"]


def test_a_release_that_comes_too_late_reports_the_loss(world, heard):
    """A lease that had ended before its task did is reported as lost."""
    lease = world.lease(lock_watchdog_timeout=30)
    world.clock.advance(40)
    lease.release()
    assert names(heard) == ["lock_acquired", "lock_lost"]


def test_a_release_touches_no_other_owner(world):
    """A lost lease's release leaves the new holder alone."""
    lease = world.lease(lock_watchdog_timeout=30)
    world.clock.advance(40)
    world.lease(owner="new")
    lease.release()
    assert world.store.leases["dislock:{k}"][0] == "new"


def test_a_server_that_is_away_at_release_does_not_raise(world, caplog):
    """The task's result is not spoilt: the log says that the lock ends by itself, and when."""
    lease = world.lease(lock_watchdog_timeout=30)
    world.store.away = True
    lease.release()
    assert "ends by itself within 30.0 s" in caplog.text


def test_leave_stops_the_renewals_and_sends_nothing(world, heard):
    """A lease left to expire is neither renewed nor released."""
    lease = world.lease()
    lease.leave()
    world.run(100)
    assert [call[0] for call in world.store.calls] == ["acquire"]
    assert heard[-1][0] == "lock_released"
    assert heard[-1][1]["expiring"] is True


def test_at_least_for_is_passed_on_at_release(world):
    """A short task holds its lock for the time it promised."""
    world.lease(lock_at_least_for=60).release()
    assert world.store.asked("release") == [("dislock:{k}", "me", 60)]


def test_at_least_for_prolongs_a_lease_that_is_left(world):
    """A lease left to expire ends no earlier than it would have, nor than it promised."""
    lease = world.lease(lock_at_least_for=10, lock_watchdog_timeout=30)
    world.clock.advance(5)
    lease.leave()
    assert world.store.asked("release") == [("dislock:{k}", "me", pytest.approx(30))]


def test_an_answer_that_comes_too_late_is_no_lease(world):
    """Granted after trust would have ended: given back, and treated as no answer."""
    world.store.latency = 31
    with pytest.raises(StoreError, match="too late"):
        world.lease(lock_watchdog_timeout=30)
    assert world.store.leases == {}


def test_lost_is_said_with_reason_and_action(world, heard, caplog):
    """The log names key, task and why; the action comes even where a receiver exits."""
    lease = world.lease(lock_on_lost="raise")
    actions = []
    lease.on_end = lambda _lease, action: actions.append(action)
    lease.lose("stolen")
    lease.report_lost()
    assert names(heard) == ["lock_acquired", "lock_lost"]
    assert heard[-1][1]["reason"] == "stolen"
    assert actions == ["raise"]
    assert "'k'" in caplog.text
    assert "t[1] on w (pid 7)" in caplog.text


def test_a_lease_meets_one_end(world, heard):
    """A lease that was found lost while its owner released it is lost, not released as well."""
    lease = world.lease()
    unwatch = world.watchdog.unwatch

    def lost_meanwhile(lease):
        unwatch(lease)
        lease.lose("stolen")

    world.watchdog.unwatch = lost_meanwhile
    lease.release()
    lease.report_lost()
    assert names(heard) == ["lock_acquired", "lock_lost"]


def test_a_receiver_that_raises_does_not_spoil_the_acquisition(world, receiving):
    """A bug in a user's receiver is logged by Celery's dispatcher, and the lock is held."""

    def receiver(**_):
        raise ValueError

    with receiving(signals.lock_acquired, receiver), receiving(signals.lock_released, receiver):
        lease = world.lease()
        assert isinstance(lease, Lease)
        lease.release()
    assert world.store.leases == {}


def test_holders_read_well_even_with_parts_missing():
    """A holder written by something else still makes a message."""
    assert in_words({"task": "t"}) == "t[?] on ? (pid ?)"


class TestWaitingThatFails:
    """A server that takes and releases locks, and lets nobody wait on its list."""

    def test_it_asks_ever_more_seldom_and_says_so_once(self, world, caplog):
        """In ten minutes a waiter asks some hundred times, and logs one line with the reason."""
        world.lease(owner="first", lock_watchdog_timeout=6000)
        world.store.wait_error = StoreError("redis://fake", "no lists today")
        world.store.calls.clear()
        answer = world.lock().acquire(Claim("second", HOLDER), timeout=600)
        assert isinstance(answer, Conflict)
        assert 100 < len(world.store.asked("acquire")) < 400
        warnings = [record.getMessage() for record in caplog.records]
        assert len(warnings) == 1
        assert "'k'" in warnings[0]
        assert "no lists today" in warnings[0]

    def test_it_is_given_the_lock_all_the_same(self, world):
        """A waiter that nobody wakes finds the lock free within two seconds."""
        lease = world.lease(owner="first", lock_watchdog_timeout=6000)
        world.store.wait_error = StoreError("redis://fake", "no lists today")
        free_at = world.clock() + 60

        def pause(seconds):
            world.clock.advance(seconds)
            if world.clock() >= free_at:
                lease.release()

        lock = world.lock()
        lock.pause = pause
        assert isinstance(lock.acquire(Claim("second", HOLDER), timeout=600), Lease)
        assert world.clock() < free_at + 2

    def test_it_rests_for_less_than_the_leases_that_it_keeps(self, world):
        """Locks that were taken before this one are asked for again before they expire."""
        world.lease(owner="first", lock_watchdog_timeout=6000)
        world.store.wait_error = StoreError("redis://fake", "no lists today")
        pauses = []
        lock = world.lock(lock_watchdog_timeout=3)
        lock.pause = lambda seconds: (pauses.append(seconds), world.clock.advance(seconds))
        lock.acquire(Claim("second", HOLDER), timeout=60)
        assert max(pauses) <= 1.0

    def test_what_is_forbidden_is_no_outage(self, world):
        """A user who may not wait is told so at once, and the place in line is given up."""
        world.lease(owner="first")
        world.store.wait_error = ForbiddenError("redis://fake", "no permission to run 'blpop'")
        world.store.calls.clear()
        with pytest.raises(ForbiddenError, match="'blpop'"):
            world.lock().acquire(Claim("second", HOLDER), timeout=600)
        assert [call[0] for call in world.store.calls] == ["acquire", "wait", "release"]


def test_what_was_never_asked_is_not_taken_back(world):
    """Where no connection could be made, the waiter does not try another to give up its place."""
    world.store.acquire = lambda *_, **__: (_ for _ in ()).throw(
        UnreachableError("redis://fake", "no answer to the TLS handshake")
    )
    with pytest.raises(UnreachableError):
        world.lock().acquire(Claim("a", HOLDER), timeout=600)
    assert world.store.calls == []
