"""Renewals and losses, driven tick by tick."""

from __future__ import annotations

import logging
import threading

import pytest

from celery_dislock.exceptions import LockLostError, StoreError
from celery_dislock.locks.attempt import Attempt
from celery_dislock.locks.callers import Caller, CallerLease
from celery_dislock.locks.lease import End
from celery_dislock.locks.renewals import BATCH
from celery_dislock.servers.requests import Ending
from celery_dislock.servers.reservations import Reservation


def names(events):
    return [name for name, _ in events if name != "lock_acquired"]


def test_a_lease_is_renewed_every_third_of_its_timeout(world):
    """Nothing is asked before; each renewal resets the expiry, and does not add to it."""
    lease = world.lease(lock_watchdog_timeout=30)
    world.run(9)
    assert world.store.asked("renew") == []
    world.run(291)
    assert 29 <= len(world.store.asked("renew")) <= 32
    assert world.store.leases["dislock:{k}"][1] <= world.clock.now + 30
    assert 19 < lease.remaining <= 30


def test_leases_due_together_are_renewed_in_bounded_batches(world):
    """More leases than a batch has room for take two round trips."""
    for number in range(BATCH + 1):
        world.lease(f"k{number}", f"o{number}", lock_watchdog_timeout=30)
    world.run(10.5)
    assert [len(owners) for (owners,) in world.store.asked("renew")] == [BATCH, 1]


def test_leases_that_are_due_soon_join_the_batch(world):
    """Renewals that are half a second apart share a round trip."""
    world.lease("a", "a", lock_watchdog_timeout=30)
    world.clock.advance(0.4)
    world.lease("b", "b", lock_watchdog_timeout=30)
    world.run(10)
    assert world.store.asked("renew") == [(["a", "b"],)]


@pytest.mark.parametrize(("until", "kept"), [("end", True), ("start", False)])
def test_the_reservation_of_a_task_that_runs_is_kept(world, until, kept):
    """It is renewed after its lease, unless it has ended with the start."""
    lease = world.lease(lock_watchdog_timeout=30)
    lease.reservation = Reservation("dislock:{k}", "1", mark="m", number=1, until=until)
    world.run(11)
    expected = [("keep", [lease.reservation], True)] if kept else []
    assert world.store.reservations.asked == expected


def test_the_most_urgent_lease_comes_first(world):
    """Of two leases that are due, the one with less trust left is renewed first."""
    world.lease("long", "long", lock_watchdog_timeout=12)
    world.clock.advance(3.3)
    world.lease("short", "short", lock_watchdog_timeout=1.5)
    world.clock.advance(1)
    world.watchdog.tick()
    assert world.store.asked("renew") == [(["short", "long"],)]


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_a_failed_renewal_is_tried_again_soon(world, caplog, error):
    """An outage costs several early tries and two log lines, and no lease; nor does a defect."""
    caplog.set_level(logging.INFO, "celery_dislock")
    lease = world.lease(lock_watchdog_timeout=30)
    renew = world.store.renew
    world.store.away = error is None
    if error is not None:
        world.store.renew = lambda *_, **__: 1 / 0
    world.run(15)
    assert len(world.store.asked("renew")) >= 3 or world.watchdog.errors >= 3
    world.store.away, world.store.renew = False, renew
    world.run(3)
    assert lease.held
    assert lease.renewals == 1
    lines = [record.getMessage() for record in caplog.records]
    assert sum(line.startswith("Cannot renew 1 lock(s), trying again") for line in lines) == 1
    assert sum(line.startswith("Locks are renewed again") for line in lines) == 1


def test_the_pauses_of_an_outage_grow(world):
    """Tries come less often the longer the server is away, but at least once a second."""
    world.lease(lock_watchdog_timeout=300)
    world.store.away = True
    world.run(130)
    assert 25 <= len(world.store.asked("renew")) <= 45


@pytest.mark.parametrize("waits", [False, True], ids=["cut", "silent"])
def test_the_first_retry_follows_at_once(world, waits):
    """A connection that was cut while it was idle, or is silent, costs no pause beside."""
    lease = world.lease(lock_watchdog_timeout=1)
    tried = []

    def fails(leases, *, within):
        tried.append(world.clock.now - lease.since)
        world.clock.advance(within if waits else 0)
        raise StoreError("redis://fake", "no reply")

    world.store.renew = fails
    world.run(1)
    assert tried[:2] == pytest.approx([1 / 3, 0.617 if waits else 1 / 3], abs=0.002)
    assert lease.lost
    assert len(tried) < 12


def test_the_time_that_a_try_has_waited_is_part_of_the_pause(world):
    """Of a server that is silent, and not away, nobody waits to ask it again."""
    lease = world.lease(lock_watchdog_timeout=30)
    tried = []

    def silent(leases, *, within):
        tried.append(world.clock.now - lease.since)
        world.clock.advance(within)
        raise StoreError("redis://fake", "no reply")

    world.store.renew = silent
    world.run(16)
    assert tried[:5] == pytest.approx([10, 11, 12, 13, 14], abs=0.1)


def test_a_lease_not_renewed_in_time_is_lost_at_its_deadline(world, heard):
    """Trust ends half a second before the expiry, counted from before the acquisition was sent."""
    lease = world.lease(lock_watchdog_timeout=30)
    world.store.away = True
    world.run(29.4)
    assert lease.held
    world.run(0.2)
    assert not lease.held
    assert names(heard) == ["lock_lost"]
    assert lease.remaining == 0


def test_a_slow_answer_shortens_trust(world):
    """Trust counts from when the renewal was sent, however late the answer."""
    lease = world.lease(lock_watchdog_timeout=30)
    world.clock.advance(10)
    sent_at = world.clock.now
    world.store.latency = 5
    world.watchdog.tick()
    assert lease.trusted_until == pytest.approx(sent_at + 29.5)


def test_past_its_deadline_a_lease_is_lost_even_if_the_server_would_extend_it(world, heard):
    """A process that slept too long does not ask: others may have been told that it was gone."""
    lease = world.lease(lock_watchdog_timeout=30)
    world.store.leases["dislock:{k}"] = ("me", world.clock.now + 1000, {})
    world.clock.advance(60)
    world.watchdog.tick()
    assert world.store.asked("renew") == []
    assert not lease.held
    assert names(heard) == ["lock_lost"]


def test_one_refused_lease_does_not_harm_its_batch(world):
    """An error for one lease retries that one; the others of its batch are renewed."""
    ill = world.lease("ill", "ill", lock_watchdog_timeout=30)
    well = world.lease("well", "well", lock_watchdog_timeout=30)
    world.store.answers["ill"] = StoreError("redis://fake", "OOM")
    world.run(11)
    assert (ill.renewals, well.renewals) == (0, 1)
    del world.store.answers["ill"]
    world.run(2)
    assert ill.renewals == 1


def test_the_cap_stops_the_renewals(world, heard):
    """After max_renew_times renewals the lease is left alone, said once, and runs out."""
    lease = world.lease(lock_watchdog_timeout=30, max_renew_times=3)
    world.run(200)
    assert names(heard) == ["lock_renewed"] * 3 + ["lock_capped"]
    assert lease.capped
    assert not lease.held
    assert len(world.watchdog.renewals) == 0
    lease.release()
    assert names(heard)[-1] == "lock_capped"


@pytest.mark.parametrize("cap", [0, -1])
def test_zero_or_less_is_no_cap(world, cap):
    """Without a cap the lease is renewed on and on."""
    lease = world.lease(lock_watchdog_timeout=3, max_renew_times=cap)
    world.run(1200)
    assert lease.renewals > 1000


def test_a_fixed_expiry_is_never_renewed_and_its_end_is_reported(world, heard):
    """With lock_expire the server hears nothing more, and a body that outlives it is told."""
    lease = world.lease(lock_expire=60)
    world.run(59.4)
    assert lease.held
    world.run(1)
    assert world.store.asked("renew") == []
    assert names(heard) == ["lock_lost"]
    assert "fixed expiry of 60 s" in heard[-1][1]["reason"]


def test_a_renewal_answered_after_the_release_says_nothing(world, heard):
    """A lease released while its renewal was under way is not reported as lost."""
    lease = world.lease(lock_watchdog_timeout=30)
    renew = world.store.renew

    def release_meanwhile(leases, *, within):
        lease.release()
        return renew(leases, within=within)

    world.store.renew = release_meanwhile
    world.run(11)
    assert names(heard) == ["lock_released"]


def take_for(world, caller):
    """Take a lock that *caller* must release."""
    holder = {"thread": "short", "worker": "w", "pid": 7}
    lock = world.lock(lock_watchdog_timeout=30)
    lease = lock.try_acquire(Attempt("me", holder))
    caller.hold(CallerLease(lock, lease))
    return lease


def test_a_lease_whose_caller_is_gone_is_renewed_no_more(world, caplog, heard):
    """Nobody is left to release it: it runs out, and the log says why."""
    caller = Caller()
    lease = take_for(world, caller)
    world.run(11)
    assert len(world.store.asked("renew")) == 1
    del caller
    world.run(100)
    assert len(world.store.asked("renew")) == 1
    assert lease.end is End.ABANDONED
    assert len(world.watchdog.renewals) == 0
    assert "thread short on w (pid 7) is renewed no more" in caplog.text
    assert names(heard) == ["lock_renewed"]


def test_a_thread_that_has_ended_is_noticed_though_something_refers_to_it(world):
    """A traceback, or a cycle that nobody has collected yet, may keep alive what the thread had."""
    made = []
    thread = threading.Thread(target=lambda: made.append(Caller()))
    thread.start()
    thread.join()
    take_for(world, made[0])
    world.run(100)
    assert world.store.asked("renew") == []


def test_a_step_may_be_interrupted_by_another(world):
    """A signal handler that takes and releases a lock in the middle of a step is not waited for."""
    inner = []

    def caller_ended():  # asked in the middle of a step
        inner.append(world.lease("inner", f"i{len(inner)}", lock_watchdog_timeout=30))
        inner[-1].release()
        return False

    lease = world.lock(lock_watchdog_timeout=30).try_acquire(Attempt("o", {}))
    lease.caller_ended = caller_ended
    step = threading.Thread(target=world.run, args=(11,), daemon=True)
    step.start()
    step.join(30)
    assert not step.is_alive()
    assert [one.finished for one in inner] == [True]


class TestStalls:
    """A pool process was stopped, or a body held the GIL, and the main process renewed."""

    @pytest.fixture
    def world(self, world):
        world.watchdog.renewals.asks = True
        return world

    @staticmethod
    def stall(world, lease, seconds, *, renewed=True):
        """Let time pass while no loop runs; and let somebody else renew the lease."""
        world.run(1)
        for _ in range(int(seconds)):
            world.clock.advance(1)
            if renewed:
                world.store.renew([(lease.driver.names, lease.owner, 30)], within=1)
        world.store.calls.clear()

    def test_a_lease_that_others_renewed_is_held_on(self, world, heard):
        """The server says that it has never expired, so nobody was let in."""
        lease = world.lease(lock_watchdog_timeout=30)
        self.stall(world, lease, 100)
        world.watchdog.tick()
        assert len(world.store.asked("renew")) == 1
        assert lease.held
        assert lease.renewals == 10  # the cap counts those of others, too
        assert "lock_lost" not in names(heard)

    def test_a_stall_after_an_outage_changes_nothing(self, world):
        """The trust has ended just when the process was stopped: that lease is lost."""
        lease = world.lease(lock_watchdog_timeout=30)
        world.store.away = True
        world.run(29.48)
        world.store.away = False
        world.store.answers["me"] = True
        world.clock.advance(100)
        world.watchdog.tick()
        assert lease.lost

    def test_it_asks_on_while_the_server_is_away(self, world, heard):
        """Not held meanwhile, and not lost; and held as soon as the server says so."""
        lease = world.lease(lock_watchdog_timeout=30)
        self.stall(world, lease, 100)
        world.store.away = True
        world.run(9)
        assert not lease.held
        assert not lease.lost
        world.store.away = False
        world.run(2)
        assert lease.held

    def test_without_any_answer_it_is_lost(self, world, heard):
        """After the timeout for which another may have renewed it, and without a busy loop."""
        lease = world.lease(lock_watchdog_timeout=30)
        self.stall(world, lease, 100)
        world.store.away = True
        world.run(29)
        assert not lease.lost
        world.run(2)
        assert lease.lost
        assert len(world.store.asked("renew")) < 60

    def test_past_its_cap_it_is_capped(self, world, heard):
        """Those who renewed it meanwhile stopped there, too."""
        lease = world.lease(lock_watchdog_timeout=30, max_renew_times=5)
        self.stall(world, lease, 60)
        world.run(12)
        assert lease.capped
        assert len(world.store.asked("renew")) == 1

    def test_a_stall_in_a_round_trip_is_one(self, world, heard):
        """The reply that came meanwhile is older than the trust it gives."""
        lease = world.lease(lock_watchdog_timeout=30)
        other = world.lease("other", "other", lock_watchdog_timeout=31)
        world.run(9)
        self.stall_in_a_round_trip(world, lease, other)
        assert lease.held
        assert other.held

    def test_a_stall_while_it_asks_is_one_too(self, world):
        """The process is stopped again before it has heard what it asked after the first stall."""
        lease = world.lease(lock_watchdog_timeout=30)
        self.stall(world, lease, 100)
        self.stall_in_a_round_trip(world, lease)
        assert lease.held

    @staticmethod
    def stall_in_a_round_trip(world, *leases):
        renew = world.store.renew

        def stalled(*args, **kwargs):
            answers = renew(*args, **kwargs)
            for _ in range(10):
                world.clock.advance(10)
                renew([(one.driver.names, one.owner, 30) for one in leases], within=1)
            return answers

        world.store.renew = stalled
        world.run(2)
        world.store.renew = renew
        world.run(2)

    def test_a_fixed_expiry_is_not_asked_for(self, world):
        """Nobody renews such a lease."""
        lease = world.lease(lock_expire=30)
        self.stall(world, lease, 100)
        with pytest.raises(LockLostError):
            lease.ensure_held()
        world.watchdog.tick()
        assert lease.lost
        assert world.store.calls == []

    def test_held_asks_first(self, world):
        """As ensure_held() does; without an answer it is not held; a repr never asks."""
        lease = world.lease(lock_watchdog_timeout=30)
        self.stall(world, lease, 100)
        world.store.away = True
        assert "its time ran out" in repr(lease)
        assert world.store.calls == []
        assert lease.held is False
        assert lease.remaining == 0
        with pytest.raises(LockLostError, match=r"its time ran out, and .*away"):
            lease.ensure_held()
        assert lease.lost is False
        world.store.away = False
        assert lease.held is True
        assert lease.remaining == pytest.approx(29.5)

    def test_ensure_held_raises_if_nobody_renewed(self, world, heard):
        """The lease is lost, and is reported once."""
        lease = world.lease(lock_watchdog_timeout=30)
        self.stall(world, lease, 100, renewed=False)
        for _ in range(2):
            with pytest.raises(LockLostError, match="the server no longer has it"):
                lease.ensure_held()
        world.run(2)
        assert names(heard) == ["lock_lost"]

    def test_ensure_held_never_goes_beyond_the_cap(self, world):
        """A capped lease that has run out stays so."""
        lease = world.lease(lock_watchdog_timeout=30, max_renew_times=1)
        world.run(25)
        assert lease.capped
        world.clock.advance(30)
        with pytest.raises(LockLostError):
            lease.ensure_held()
        assert world.store.asked("extend") == []

    def test_a_lease_that_is_left_after_a_stall_lives_as_long_as_it_may(self, world):
        """Nobody here knows when it was renewed last: perhaps just now."""
        lease = world.lease(lock_watchdog_timeout=30)
        self.stall(world, lease, 100)
        lease.release(Ending(expires=True))
        [(_, *_, at_least)] = world.store.asked("release")
        assert lease.acquired_at + at_least == pytest.approx(world.clock() + 30)
