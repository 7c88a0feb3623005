"""Waiting in line, and what a waiter makes of the lease that it is handed; time is the test's."""

import signal
import threading
import time
from contextlib import ExitStack, closing

import pytest

from celery_dislock import LockHeldError, StoreError, scripts
from celery_dislock.exceptions import ForbiddenError
from celery_dislock.servers.replies import TAKE_UP
from celery_dislock.servers.store import Store
from proof.proxy import cut
from tests.holding import name_of, wait_for
from tests.integration.driven import ALWAYS, waits


@pytest.fixture
def first(driven):
    """Somebody's lease, for which others wait."""
    lease = driven.take()
    driven.proxy.commands.clear()
    yield lease
    lease.release()


@pytest.fixture
def acquire(driven):
    """Make what takes the lock, waiting in line, and returns its lease."""
    locks = []

    def acquire(timeout=None, **options):
        def call():
            lock = driven.lock(**options)
            if not lock.acquire(timeout=timeout):
                return None
            locks.append(lock)
            return lock.lease

        return call

    yield acquire
    for lock in locks:
        lock.release()


def test_what_is_handed_over_is_held_without_asking_again(driven, first, acquire):
    """The token comes with the news; one question and one wake-up are all."""
    with driven.waiting(acquire()) as got:
        driven.advance(3)
        first.release()
    [lease] = got
    assert driven.asked(scripts.ACQUIRE) == driven.proxy.count(waits) == 1
    assert lease.held
    assert [one.token for one in driven.lock().holders()] == [lease.token]


def test_a_hand_off_is_trusted_for_what_was_reserved(driven, first, acquire):
    """Until its first renewal, which comes soon and does not count towards the cap."""
    with driven.waiting(acquire(max_renew_times=1)) as got:
        driven.advance(3)
        first.release()
    [lease] = got
    assert TAKE_UP * 0.8 < lease.remaining <= TAKE_UP * 0.9
    driven.advance(TAKE_UP / 3)
    assert lease.renewals == 0
    assert lease.remaining == pytest.approx(29.5, abs=0.4)
    driven.advance(10.5)
    assert lease.renewals == 1
    assert not lease.capped


@pytest.mark.parametrize(("late", "asked"), [(2.0, 1), (4.7, 2)])
def test_a_hand_off_is_trusted_from_when_it_was_made(driven, first, acquire, late, asked):
    """A waiter that slept through the reservation asks again, and holds nothing meanwhile."""
    driven.fault(scripts.RENEW, cut)  # its watchdog is not to be faster than this test
    with driven.waiting(acquire()) as got:
        driven.advance(3)
        driven.proxy.black_hole()
        driven.beside().lock_of("k").free()
        driven.stall(late)
        driven.proxy.heal()
    [lease] = got
    assert driven.asked(scripts.ACQUIRE) == asked
    assert lease.remaining == pytest.approx(TAKE_UP * 0.9 - late if asked == 1 else 29.5, abs=0.4)


def test_a_fixed_expiry_is_asked_for(driven, first, acquire):
    """No renewal would bring a lease with a fixed expiry to its length: it is confirmed instead."""
    with driven.waiting(acquire(expire=60)) as got:
        first.release()
    [lease] = got
    assert driven.asked(scripts.ACQUIRE) == 2
    assert lease.remaining == pytest.approx(59.5, abs=0.4)


def test_who_waits_asks_when_the_lease_in_its_way_would_have_run_out(driven, acquire):
    """A holder that crashed is noticed at once."""
    driven.crash_holder("k", timeout=12)
    driven.proxy.commands.clear()
    with driven.waiting(acquire()) as got:
        driven.advance(11.8)
        assert driven.asked(scripts.ACQUIRE) == 1
        driven.advance(0.5)
    assert got[0].held
    assert driven.asked(scripts.ACQUIRE) == 2


def test_a_place_in_line_is_kept_by_asking(driven, acquire):
    """At least every half a minute; and a place for which nobody asks is passed over."""
    driven.crash_holder("k", timeout=200)
    driven.proxy.commands.clear()
    with driven.waiting(acquire()) as got:
        for asked in range(2, 7):
            driven.advance(30.5)
            driven.wait_for_waits(asked)
            assert driven.asked(scripts.ACQUIRE) == asked
            assert driven.in_line() == 1
        driven.advance(50)
    assert got[0].held


def test_what_is_kept_while_waiting_is_renewed(driven, acquire):
    """Who waits for a second lock does not lose the first, which it has already."""
    driven.crash_holder("k", timeout=60)
    with driven.waiting(acquire(key=["a", "k"], watchdog_timeout=3)) as got:
        (first,) = driven.dislock.lock("a").holders()
        for asked in range(2, 9):
            driven.advance(1.1)
            driven.wait_for_waits(asked)
        driven.beside().lock_of("k").free()
    assert got[0].tokens["a"] == first.token


@pytest.mark.parametrize("timeout", [1.0, 30.0])
def test_the_next_in_line_has_the_lock_when_the_first_turns_out_to_be_dead(
    driven, first, acquire, timeout
):
    """It is told that it is the first now, and asks when the reservation has run out."""
    with closing(Store(driven.url)) as store:
        store.acquire([name_of("k")], "dead/1", timeout, "{}", place=90.0)
    with driven.waiting(acquire(watchdog_timeout=timeout)) as got:
        driven.advance(3)
        driven.proxy.commands.clear()
        first.release()
        driven.wait_for_waits(1)
        reserved = min(timeout, TAKE_UP)
        driven.advance(reserved - 0.3)
        assert driven.asked(scripts.ACQUIRE) == 0
        driven.advance(0.6)
    assert got[0].held
    assert driven.asked(scripts.ACQUIRE) == 1


def test_a_timeout_ends_the_wait(driven, first, acquire):
    """Who waited in vain is told who holds the lock, and stands in line no more."""
    with driven.waiting(acquire(5.0)) as got:
        driven.advance(4.7)
        assert not got
        driven.advance(0.4)
    assert got == [None]
    assert driven.in_line() == 0

    def enter():
        with driven.lock(timeout=5.0):
            pytest.fail("two have it")

    with driven.waiting(enter) as got:
        driven.advance(5.1)
    assert isinstance(got[0], LockHeldError)
    assert got[0].key == "k"
    assert "MainThread on " in got[0].holder


def test_a_late_hand_off_is_passed_on(driven, first, acquire):
    """A waiter that is handed the lock while it gives up passes it to the next in line."""
    lock = driven.beside().lock_of("k")
    driven.fault(scripts.RELEASE, lock.free, times=1)
    with driven.waiting(acquire(5.0)) as impatient, driven.waiting(acquire()) as after:
        driven.advance(5.1)
    assert impatient == [None]
    assert after[0].held


def test_an_exception_beside_the_hand_off_passes_it_on(driven, acquire):
    """A waiter into which an exception is thrown as it is handed the lock passes it on."""

    def hand_over():
        got.append(others.enter_context(driven.waiting(acquire())))
        driven.beside().lock_of("k").free()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    def strike(_number, _frame):
        raise ZeroDivisionError

    driven.crash_holder("k", timeout=6000)
    got = []
    before = signal.signal(signal.SIGUSR1, strike)
    try:
        with ExitStack() as others:
            driven.proxy.fault(waits, hand_over)
            with pytest.raises(ZeroDivisionError):
                driven.lock().acquire()
            driven.advance(1.5)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert got[0][0].held


def test_a_server_that_goes_away_meanwhile_is_asked_again(driven, first, acquire):
    """A wait that fails is followed by a question, whose failure is the caller's."""
    with driven.waiting(acquire()) as got, driven.outage():
        wait_for(lambda: got, "the error")
    assert isinstance(got[0], StoreError)


class TestWaitingThatFails:
    """A server that takes and releases locks, and lets nobody wait on its list."""

    @pytest.fixture(autouse=True)
    def pauses(self, driven, monkeypatch):
        """How long who waits pauses; the time passes on the driven clock."""
        pauses = []

        def sleep(seconds):
            pauses.append(seconds)
            driven.stall(seconds)

        monkeypatch.setattr(time, "sleep", sleep)
        driven.proxy.fault(waits, "-ERR no lists today", times=ALWAYS)
        return pauses

    def test_it_asks_ever_more_seldom_and_says_so_once(self, driven, caplog, pauses):
        """In two minutes a waiter asks some sixty times, and logs one line with the reason."""
        driven.crash_holder("k", timeout=6000)
        driven.proxy.commands.clear()
        assert not driven.lock().acquire(timeout=120)
        assert 20 < driven.asked(scripts.ACQUIRE) < 80
        assert [one for one in pauses if one][:6] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0]
        [warning] = [record.getMessage() for record in caplog.records]
        assert "'k'" in warning
        assert "no lists today" in warning

    def test_it_rests_for_less_than_the_leases_that_it_keeps(self, driven, pauses):
        """Locks that were taken before this one are asked for again before they expire."""
        driven.crash_holder("k", timeout=6000)
        assert not driven.lock(["a", "k"], watchdog_timeout=3).acquire(timeout=60)
        assert max(pauses) <= 1.0

    def test_what_is_forbidden_is_no_outage(self, driven):
        """A user who may not wait is told so at once, and the place in line is given up."""
        driven.crash_holder("k", timeout=6000)
        driven.proxy.forget_faults()
        driven.proxy.fault(waits, "-NOPERM this user has no permissions to run 'blpop'")
        driven.proxy.commands.clear()
        with pytest.raises(ForbiddenError, match="'blpop'"):
            driven.lock().acquire(timeout=600)
        assert driven.asked(scripts.ACQUIRE) == 1
        assert driven.in_line() == 0


@pytest.mark.parametrize("fault", ["-ERR no such database", cut])
def test_a_lock_may_stay_taken_only_if_the_server_may_have_granted_it(driven, caplog, fault):
    """An error that the server answered with, as for a wrong database, has granted nothing."""
    for script in (scripts.ACQUIRE, scripts.RELEASE):
        driven.fault(script, fault)
    with pytest.raises(StoreError):
        driven.lock().acquire()
    assert ("may stay taken" in caplog.text) is (fault == cut)
