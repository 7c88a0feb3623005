"""How leases are kept, and how they are lost, as time passes."""

import asyncio
import logging
import threading
from collections import Counter
from contextlib import ExitStack

import gevent
import pytest
from billiard import current_process

from celery_dislock import LockLostError, StoreError, scripts
from celery_dislock.servers.store import Store
from proof.proxy import cut, lose_reply
from tests.holding import Holding, name_of, wait_for
from tests.integration.driven import driving


def names(heard):
    return [name for name, _ in heard if name not in {"lock_acquired", "lock_renewed"}]


def test_a_lease_is_renewed_every_third_of_its_timeout(driven):
    """Nothing is asked before; each renewal resets the expiry, and does not add to it."""
    with driven.lock() as lease:
        driven.advance(9)
        assert driven.asked(scripts.RENEW) == 0
        driven.advance(291)
        assert not driven.beside().lock("k").try_acquire()
        assert 29 <= driven.asked(scripts.RENEW) <= 32
        assert 29 <= lease.renewals <= driven.asked(scripts.RENEW)
        assert driven.client.pttl(name_of("k")) <= 30_000
        assert 300 <= lease.held_for < 301
        assert 19 < lease.remaining <= 30


def test_the_most_urgent_lease_comes_first(driven):
    """Of those that are due together, the one with less trust left is renewed first."""
    with driven.lock("long", watchdog_timeout=12):
        driven.advance(3.3)
        with driven.lock("short", watchdog_timeout=1.5):
            driven.stall(1)
            driven.advance(0)
    sent = [command for command, _ in driven.proxy.commands]
    first = [one for one in sent if b"dislock:{short}" in one or b"dislock:{long}" in one][2]
    assert b"dislock:{short}" in first


@pytest.mark.parametrize(("later", "renewals"), [(0.45, 1), (0.55, 0)])
def test_a_lease_that_is_due_soon_is_renewed_with_the_others(driven, later, renewals):
    """Up to a twentieth of its interval early: fewer round trips for a process of many leases."""
    with driven.lock("first") as first:
        driven.advance(later)
        with driven.lock("second") as second:
            driven.advance(first.acquired_at + 10.01 - driven.now)
            assert (first.renewals, second.renewals) == (1, renewals)


@pytest.mark.extra
def test_five_hundred_leases_are_renewed_in_one_round_trip(driven):
    """More wait for the next one: a process of many leases does not block a server for long."""
    leases = [driven.take(f"k{number}") for number in range(501)]
    driven.fault(scripts.RENEW, lambda: driven.stall(5), times=1)
    for seconds in (11, 0):  # the first round trip takes five seconds more
        driven.advance(seconds)
    assert {lease.renewals for lease in leases} == {1}
    trusted = Counter(round(lease.remaining / 5) for lease in leases)  # from before it was sent
    assert sorted(trusted.values()) == [1, 500]
    for lease in leases:
        lease.release()


@pytest.mark.parametrize("fault", ["-ERR not now", cut])
def test_a_failed_renewal_is_tried_again_soon(driven, caplog, fault):
    """An outage costs several early tries and two log lines, and no lease."""
    caplog.set_level(logging.INFO, "celery_dislock")
    with driven.lock() as lease:
        driven.fault(scripts.RENEW, fault)
        driven.advance(15)
        assert driven.asked(scripts.RENEW) == 9  # pauses double, up to a second
        driven.proxy.forget_faults()
        driven.advance(3)
        assert lease.held
        assert lease.renewals == 1
    lines = [record.getMessage() for record in caplog.records]
    assert sum(line.startswith("Cannot renew 1 lock(s), trying again") for line in lines) == 1
    assert sum(line.startswith("Locks are renewed again") for line in lines) == 1


def test_the_first_retry_follows_at_once(driven, caplog):
    """A connection that was cut while it was idle costs no pause beside, and is told."""
    with driven.lock() as lease:
        driven.fault(scripts.RENEW, cut, times=1)
        driven.advance(10.01)
        assert (driven.asked(scripts.RENEW), lease.renewals) == (2, 1)
    assert "Cannot renew 1 lock(s), trying again" in caplog.text


def test_a_lease_not_renewed_in_time_is_lost_at_its_deadline(driven, heard):
    """Trust ends half a second before the expiry, for good, and is reported once."""
    with pytest.raises(LockLostError, match="renewed in time"), driven.lock() as lease:
        driven.fault(scripts.RENEW, "-ERR not now")
        driven.advance(lease.acquired_at + 29.49 - driven.now)
        assert lease.held
        driven.advance(0.02)
        assert not lease.held
        assert lease.remaining == 0
        driven.renew_elsewhere(lease, 100)  # whatever the server still has
        driven.proxy.forget_faults()
        driven.advance(20)
        assert lease.lost
    assert names(heard) == ["lock_lost"]


def test_a_lease_that_the_server_no_longer_has_is_told_of_once(driven, heard, caplog):
    """At its next renewal, which is the last."""
    with pytest.raises(LockLostError, match="no longer has it"), driven.lock() as lease:
        driven.client.delete(name_of("k"))
        driven.advance(11)
        assert lease.lost
        driven.advance(60)
    assert driven.asked(scripts.RENEW) == 1
    assert names(heard) == ["lock_lost"]
    assert caplog.text.count("is lost: the server no longer has it") == 1


@pytest.mark.parametrize("script", [scripts.ACQUIRE, scripts.RENEW], ids=["acquired", "renewed"])
def test_a_slow_answer_shortens_trust(driven, script):
    """Trust counts from when the request was sent, however late the answer."""
    driven.fault(script, lambda: driven.stall(5), times=1)
    with driven.lock() as lease:
        if script is scripts.RENEW:
            driven.advance(10.1)
            assert lease.renewals == 1
        assert lease.remaining == pytest.approx(24.5, abs=0.11)


def test_an_answer_that_comes_too_late_is_no_lease(driven):
    """Granted after trust would have ended: given back, and treated as no answer."""
    driven.fault(scripts.ACQUIRE, lambda: driven.stall(31), times=1)
    with pytest.raises(StoreError, match="too late"):
        driven.take()
    driven.assert_free("k")


def test_one_refused_lease_does_not_harm_its_batch(driven):
    """An error for one lease retries that one; the others of its batch are renewed."""
    with driven.lock("ill") as ill, driven.lock("well") as well:
        driven.fault(scripts.RENEW, "-OOM no memory", about="{ill}")
        driven.advance(11)
        assert (ill.renewals, well.renewals) == (0, 1)
        driven.proxy.forget_faults()
        driven.advance(2)
        assert ill.renewals == 1


@pytest.mark.parametrize(("way", "nth"), [(cut, 1), (lose_reply, 25)])
def test_a_batch_that_is_cut_short_costs_no_lease(driven, heard, way, nth):
    """All of its leases are renewed soon after, whichever reply was lost."""
    with ExitStack() as stack:
        leases = [stack.enter_context(driven.lock(f"k{number}")) for number in range(50)]
        driven.fault(scripts.RENEW, way, nth=nth, times=1)
        driven.advance(12)
        assert driven.proxy.count(lambda _: True, way) == 1
        assert {lease.renewals for lease in leases} == {1}
        assert names(heard) == []


def test_the_cap_stops_the_renewals(driven, heard):
    """After max_renew_times renewals the lease is left alone, said once, and runs out."""
    with pytest.raises(LockLostError, match="its cap"), driven.lock(max_renew_times=3) as lease:
        driven.advance(200)
        assert lease.capped
        assert not lease.held
        assert driven.asked(scripts.RENEW) == 3
    assert names(heard) == ["lock_capped"]
    assert [name for name, _ in heard].count("lock_renewed") == 3


@pytest.mark.parametrize("cap", [0, -1])
def test_zero_or_less_is_no_cap(driven, cap):
    """Without a cap the lease is renewed on and on."""
    with driven.lock(watchdog_timeout=3, max_renew_times=cap) as lease:
        driven.advance(200)
        assert lease.renewals > 150


def test_a_fixed_expiry_is_never_renewed_and_its_end_is_reported(driven, heard):
    """With expire the server hears nothing more, and a body that outlives it is told."""
    with pytest.raises(LockLostError, match="expiry of 60 s"), driven.lock(expire=60) as lease:
        assert "timeout" not in lease.holder  # from which others would tell a renewal
        driven.advance(lease.acquired_at + 59.4 - driven.now)
        assert lease.held
        driven.advance(1)
        assert not lease.held
    assert driven.asked(scripts.RENEW) == 0
    assert names(heard) == ["lock_lost"]


def test_a_renewal_answered_after_the_release_says_nothing(driven, heard):
    """A lease released while its renewal was under way is not reported as lost."""
    lease = driven.take()
    driven.fault(scripts.RENEW, lease.release, times=1)
    driven.advance(11)
    assert driven.asked(scripts.RENEW) == 1
    assert names(heard) == ["lock_released"]


def test_a_lease_whose_thread_has_ended_is_renewed_no_more(driven, caplog, heard):
    """Nobody is left to release it: it runs out, and the log says why."""
    leases = []
    thread = threading.Thread(target=lambda: leases.append(driven.take()), name="short")
    thread.start()
    thread.join()
    driven.advance(31)
    assert not leases[0].held
    assert not leases[0].lost
    assert "thread short on " in caplog.text
    assert "is renewed no more" in caplog.text
    assert names(heard) == []
    driven.assert_free("k")


@pytest.mark.parametrize("error", [ValueError, SystemExit, asyncio.CancelledError, gevent.Timeout])
@pytest.mark.parametrize("where", ["lock_renewed", "lock_lost"])
def test_a_receiver_that_raises_harms_nothing(driven, receive, error, where):
    """A bug in a user's signal receiver does not stop the watchdog or a lease."""

    def receiver(**_):
        raise error

    receive(where, receiver)
    lost, told = driven.take("lost"), []
    lost.on_end = lambda *_: told.append("lost")
    with pytest.raises(LockLostError), driven.lock("also lost") as another:
        another.on_end = lambda *_: told.append("also lost")
        driven.client.delete(name_of("lost"), name_of("also lost"))
        driven.advance(20)
    assert sorted(told) == ["also lost", "lost"]
    with driven.lock() as lease:
        driven.advance(50)
        assert lost.lost
        assert lease.renewals >= 4
        assert lease.held


@pytest.mark.parametrize("where", ["in a round trip", "elsewhere"])
@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_an_unexpected_error_ends_no_lease(redis_url, monkeypatch, caplog, where, error):
    """It is logged, and the step is done again."""
    raised = []

    def fails(*_args, **_within):
        raised.append(error)
        raise error

    with Holding(redis_url) as holding:
        lease = holding.take("k", 3.0)
        with monkeypatch.context() as patch:
            if where == "elsewhere":
                patch.setattr(lease, "caller_ended", fails)
            else:
                patch.setattr(Store, "renew", fails)
            wait_for(lambda: len(raised) > 1, "another try")
        holding.wait_renewed(lease, 2)
    assert "the watchdog goes on" in caplog.text
    # What a round trip raises is an outage, which delays no other lease.
    assert ("Cannot renew" in caplog.text) is (where == "in a round trip")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_next_lease_starts_the_thread_again(redis_url, receive):
    """If what a receiver raises has ended the thread, all leases are renewed from then on."""
    ended = []

    def end(**_):
        if not ended:
            ended.append(threading.current_thread())
            raise KeyboardInterrupt

    receive("lock_renewed", end)
    with Holding(redis_url) as holding:
        first = holding.take("first", 3.0)
        wait_for(lambda: ended and not ended[0].is_alive(), "the end of the thread")
        second = holding.take("second", 60.0)
        holding.wait_renewed(first, 2)
        assert second.held


def test_nobody_renews_for_a_stalled_process_outside_of_a_pool(driven):
    """The server is not asked: what it says would come too late for those who saw the lease end."""
    with pytest.raises(LockLostError), driven.lock() as lease:
        TestStalls.stall(driven, lease)
        assert not lease.held
        driven.advance(0)
        assert lease.lost
    assert driven.asked(scripts.RENEW) == 0


class TestStalls:
    """A pool process was stopped, or a body held the GIL, and the main process renewed."""

    @pytest.fixture
    def driven(self, monkeypatch):
        monkeypatch.setattr(current_process(), "_name", "ForkPoolWorker-1")
        with driving() as driven:  # its process is made now
            yield driven

    @staticmethod
    def stall(driven, lease, seconds=100, *, renewed=True):
        """Let the process stand still for tens of seconds, while another renews its lease."""
        driven.advance(1)
        for _ in range(seconds // 10):
            driven.stall(10)
            if renewed:
                driven.renew_elsewhere(lease)

    def test_a_lease_that_others_renewed_is_held_on(self, driven, heard):
        """The server says that it has never expired; the cap counts the renewals of others, too."""
        with driven.lock() as lease:
            self.stall(driven, lease)
            driven.advance(0)
            assert driven.asked(scripts.RENEW) == 1
            assert lease.held
            assert lease.renewals == 10
        assert names(heard) == ["lock_released"]

    def test_a_stall_after_an_outage_changes_nothing(self, driven):
        """The trust has ended just when the process was stopped: that lease is lost."""
        with pytest.raises(LockLostError), driven.lock() as lease:
            driven.fault(scripts.RENEW, "-ERR not now")
            driven.advance(lease.acquired_at + 29.48 - driven.now)
            driven.proxy.forget_faults()
            driven.client.persist(name_of("k"))
            self.stall(driven, lease)
            driven.advance(0)
            assert lease.lost

    def test_it_asks_on_while_the_server_is_away(self, driven):
        """Not held meanwhile, and not lost; and held as soon as the server says so."""
        with driven.lock() as lease:
            self.stall(driven, lease)
            with driven.outage():
                driven.advance(9)
                assert not lease.held
                assert not lease.lost
                assert lease.remaining == 0
                with pytest.raises(LockLostError, match="its time ran out, and "):
                    lease.ensure_held()
            driven.advance(2)
            assert lease.held

    def test_without_any_answer_it_is_lost(self, driven):
        """After the timeout for which another may have renewed it, and without a busy loop."""
        with pytest.raises(LockLostError), driven.lock() as lease:
            self.stall(driven, lease)
            driven.fault(scripts.RENEW, "-ERR not now")
            driven.advance(29)
            assert not lease.lost
            driven.advance(2)
            assert lease.lost
            assert driven.asked(scripts.RENEW) < 60

    def test_past_its_cap_it_is_capped(self, driven, heard):
        """Those who renewed it meanwhile stopped there, too."""
        with driven.lock(max_renew_times=5) as lease:
            self.stall(driven, lease, 60)
            driven.advance(12)
            assert lease.capped
            assert driven.asked(scripts.RENEW) == 1

    @pytest.mark.parametrize("asking", [False, True])
    def test_a_stall_in_a_round_trip_is_one(self, driven, asking):
        """The reply that came meanwhile is older than the trust it gives."""

        def stall():
            for _ in range(10):
                driven.stall(10)
                for lease in (first, other):
                    driven.renew_elsewhere(lease)

        with driven.lock() as first, driven.lock("other", watchdog_timeout=31) as other:
            if asking:  # what it asked after an earlier one
                stall()
            driven.fault(scripts.RENEW, stall, times=1)
            driven.advance(12)
            assert first.held
            assert other.held

    def test_a_fixed_expiry_is_not_asked_for(self, driven):
        """Nobody renews such a lease."""
        with pytest.raises(LockLostError), driven.lock(expire=30) as lease:
            self.stall(driven, lease, renewed=False)
            driven.proxy.commands.clear()
            with pytest.raises(LockLostError):
                lease.ensure_held()
            driven.advance(0)
            assert lease.lost
            assert not driven.proxy.commands

    @pytest.mark.parametrize("renewed", [True, False])
    def test_who_looks_first_asks_the_server(self, driven, heard, renewed):
        """A repr never asks; a lease that nobody renewed is lost, and that is reported once."""
        lease = driven.take()
        self.stall(driven, lease, renewed=renewed)
        driven.proxy.commands.clear()
        assert "its time ran out" in repr(lease)
        assert not driven.proxy.commands
        assert lease.held is renewed
        if renewed:
            assert 29 < lease.remaining <= 29.5
            lease.release()
            return
        for _ in range(2):
            with pytest.raises(LockLostError, match="the server no longer has it"):
                lease.ensure_held()
        driven.advance(2)
        assert names(heard) == ["lock_lost"]
