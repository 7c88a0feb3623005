"""Waiting in line, and what a waiter makes of the lease that it is handed."""

from __future__ import annotations

import pytest
from redis.exceptions import ResponseError

from celery_dislock.exceptions import ForbiddenError, StoreError, UnreachableError
from celery_dislock.locks.attempt import Attempt, Conflict
from celery_dislock.locks.lease import Lease
from celery_dislock.locks.lock import ASK_AGAIN, LATE, PLACE_TIMEOUT
from celery_dislock.servers.replies import TAKE_UP, FirstInLine, Handed
from celery_dislock.servers.requests import Ending


@pytest.fixture
def handing(world):
    """Hand the lock of another to whoever waits: ``handing(after, age)``."""
    other = world.lease(owner="other")
    waits = []

    def hand(after: float, age: float = 0.0, ttl: float = TAKE_UP) -> None:
        def wait(lock, owner, seconds):
            waits.append(seconds)
            world.clock.advance(after)
            _, _, holder = world.store.leases[lock]
            world.store.leases[lock] = (owner, world.clock() - age + ttl, holder)
            world.store.wait = passing
            return Handed(7, ttl, PLACE_TIMEOUT - after + age)

        world.store.wait = wait

    def passing(lock, owner, seconds):
        waits.append(seconds)
        world.clock.advance(seconds)

    world.store.wait = passing
    hand.other, hand.waits = other, waits
    return hand


def acquire(world, timeout=None, **options):
    attempt = Attempt("me", {"task": "t", "id": "2", "worker": "w", "pid": 8})
    return world.lock(**options).acquire(attempt, timeout=timeout)


def asked(world):
    return [call[-1] for call in world.store.asked("acquire")].count("me")


def test_what_is_handed_over_is_held_without_asking_again(world, handing):
    """The token comes with the news; one question and one wake-up are all."""
    handing(after=3.0)
    lease = acquire(world)
    assert isinstance(lease, Lease)
    assert (lease.token, asked(world)) == (7, 1)
    assert lease.held


def test_a_hand_off_begins_no_task(world, handing):
    """Only the server's own grant has told it of the reservation; the guard has to begin it."""
    handing(after=3.0)
    attempt = Attempt("me", {})
    assert world.lock().acquire(attempt, timeout=None)
    assert not attempt.has_begun


def test_it_is_trusted_for_what_was_reserved(world, handing):
    """Trust begins at the hand-off, by the age of the place, and ends before the reservation."""
    handing(after=3.0, age=1.0)
    lease = acquire(world)
    assert lease.remaining == pytest.approx(TAKE_UP * 0.9 - 1.0)


def test_it_is_never_trusted_from_the_future(world, handing):
    """However a server's clock jumps, trust does not begin after the news has come."""
    handing(after=3.0, age=-60.0)
    lease = acquire(world)
    assert lease.remaining == pytest.approx(TAKE_UP * 0.9)


def test_a_place_of_an_earlier_request_makes_no_hand_off_younger(world, handing):
    """A failover may lose the request that has renewed the place, and so its age tells nothing."""

    def renew(lock, owner, seconds):
        world.clock.advance(seconds)
        world.store.leases[lock] = ("other", world.clock() + 60.0, {})
        handing(after=6.0, age=6.0 - seconds)

    world.store.wait = renew
    lease = acquire(world)
    assert (lease.held, asked(world)) == (True, 3)


def test_its_first_renewal_gives_it_its_full_length(world, handing):
    """It is renewed within a third of the reservation, which does not count towards the cap."""
    handing(after=3.0)
    lease = acquire(world, max_renew_times=1)
    world.run(TAKE_UP / 3)
    assert lease.renewals == 0
    assert lease.remaining == pytest.approx(29.5, abs=0.1)
    world.run(10.5)
    assert lease.renewals == 1
    assert not lease.capped


def test_one_that_is_left_to_expire_lasts_as_long_as_any(world, handing):
    """release_on_success=False holds on for the timeout, though only seconds were reserved."""
    handing(after=3.0)
    acquire(world).release(Ending(expires=True))
    assert world.store.asked("release")[-1][-1] == 30.0


def test_news_that_is_too_old_is_not_trusted(world, handing):
    """A waiter that slept through the reservation asks again, and holds nothing meanwhile."""
    handing(after=3.0, age=4.9)
    answer = acquire(world)
    assert asked(world) == 2
    assert isinstance(answer, Lease)  # the server confirmed it, for its full length
    assert answer.remaining == pytest.approx(29.5)


def test_a_fixed_expiry_is_asked_for(world, handing):
    """No renewal would bring a lease of lock_expire to its length: it is confirmed instead."""
    handing(after=3.0)
    lease = acquire(world, lock_expire=60.0)
    assert asked(world) == 2
    assert lease.remaining == pytest.approx(59.5)


def test_it_asks_when_the_lease_in_its_way_would_have_run_out(world, handing):
    """A holder that crashed is noticed at once, and a place is kept by asking often enough."""
    world.store.leases["dislock:{k}"] = ("other", world.clock() + 12.0, {})
    lease = acquire(world)
    assert handing.waits == [pytest.approx(12.0 + LATE)]
    assert isinstance(lease, Lease)
    lease.release()
    world.store.leases["dislock:{k}"] = ("other", world.clock() + 100.0, {})
    acquire(world)
    assert handing.waits[1:] == [
        pytest.approx(x + LATE * (x == 10)) for x in [ASK_AGAIN] * 3 + [10]
    ]


class TestBecomingTheFirstInLine:
    """The lock was handed to the waiter before this one, which may be dead."""

    @pytest.fixture
    def told(self, world, handing):
        """Tell the waiter so, this many seconds after it began to wait, once for each number."""

        def tell(*after):
            passing, left = world.store.wait, list(after)

            def wait(lock, owner, seconds):
                if not left:
                    return passing(lock, owner, seconds)
                handing.waits.append(seconds)
                world.clock.advance(left.pop(0))
                return FirstInLine()

            world.store.wait = wait

        return tell

    def test_it_asks_when_the_reservation_has_run_out(self, world, handing, told):
        """It knows for how long the lock is reserved, and need not ask for that."""
        told(3.0)
        acquire(world, timeout=25.0)
        assert handing.waits == [pytest.approx(x) for x in (25.0, TAKE_UP + LATE, 17.0 - LATE)]
        assert asked(world) == 3  # at first, after the reservation and at the end

    def test_each_hand_off_reserves_the_lock_anew(self, world, handing, told):
        """While it is the first, the lock may be handed to others that pass it."""
        told(3.0, 4.0)
        acquire(world, timeout=25.0)
        assert handing.waits[1:3] == [pytest.approx(TAKE_UP + LATE)] * 2
        assert asked(world) == 3

    def test_it_asks_no_later_than_it_would_have(self, world, handing, told):
        """Its place in line is kept by asking, whatever it is told."""
        told(28.0)
        acquire(world, timeout=100.0)
        assert handing.waits[:2] == [pytest.approx(x + LATE) for x in (30.0 - LATE, 2.0 - LATE)]

    def test_news_that_came_too_late_to_wait_makes_it_ask(self, world, handing, told):
        """The process may have slept, and a wait of no time would last for ever."""
        told(40.0)
        acquire(world, timeout=100.0)
        assert min(handing.waits) > 0

    def test_a_short_lease_is_reserved_for_no_longer(self, world, handing, told):
        """A waiter that is handed the lock has it for its timeout at most."""
        world.store.leases["dislock:{k}"] = ("other", world.clock() + 100.0, {})
        told(0.5)
        acquire(world, timeout=25.0, lock_watchdog_timeout=1.0)
        assert handing.waits[1] == pytest.approx(1.0 + LATE)

    def test_it_may_be_handed_the_lock_next(self, world, handing, told):
        """It was asked for once, and that is when its place in line began."""
        handing(after=2.0, age=-1.0)  # the place is 3 s old then
        told(1.0)
        lease = acquire(world)
        assert (lease.token, asked(world)) == (7, 1)
        assert lease.remaining == pytest.approx(TAKE_UP * 0.9)


def test_a_timeout_ends_the_wait_with_the_conflict(world, handing):
    """Who waited in vain is told who holds the lock, and stands in line no more."""
    answer = acquire(world, timeout=5.0)
    assert isinstance(answer, Conflict)
    assert sum(handing.waits) == pytest.approx(5.0)
    assert world.store.asked("release")[-1][1] == "me"


def test_a_server_that_goes_away_meanwhile_is_asked_again(world, handing):
    """A wait that fails is followed by a question, whose failure is the caller's."""

    def fail(*_):
        world.store.away = True
        raise StoreError("redis://fake", "away")

    world.store.wait = fail
    with pytest.raises(StoreError):
        acquire(world)


HOLDER = {"task": "shop.export", "id": "1", "worker": "w1", "pid": 7}


class TestWaitingThatFails:
    """A server that takes and releases locks, and lets nobody wait on its list."""

    def test_it_asks_ever_more_seldom_and_says_so_once(self, world, caplog):
        """In ten minutes a waiter asks some hundred times, and logs one line with the reason."""
        world.lease(owner="first", lock_watchdog_timeout=6000)
        world.store.wait_error = StoreError("redis://fake", "no lists today")
        world.store.calls.clear()
        answer = world.lock().acquire(Attempt("second", HOLDER), timeout=600)
        assert isinstance(answer, Conflict)
        assert 100 < len(world.store.asked("acquire")) < 400
        warnings = [record.getMessage() for record in caplog.records]
        assert len(warnings) == 1
        assert "'k'" in warnings[0]
        assert "no lists today" in warnings[0]

    def test_it_rests_for_less_than_the_leases_that_it_keeps(self, world):
        """Locks that were taken before this one are asked for again before they expire."""
        world.lease(owner="first", lock_watchdog_timeout=6000)
        world.store.wait_error = StoreError("redis://fake", "no lists today")
        pauses = []
        lock = world.lock(lock_watchdog_timeout=3)
        lock.pause = lambda seconds: (pauses.append(seconds), world.clock.advance(seconds))
        lock.acquire(Attempt("second", HOLDER), timeout=60)
        assert max(pauses) <= 1.0

    def test_what_is_forbidden_is_no_outage(self, world):
        """A user who may not wait is told so at once, and the place in line is given up."""
        world.lease(owner="first")
        world.store.wait_error = ForbiddenError("redis://fake", "no permission to run 'blpop'")
        world.store.calls.clear()
        with pytest.raises(ForbiddenError, match="'blpop'"):
            world.lock().acquire(Attempt("second", HOLDER), timeout=600)
        assert [call[0] for call in world.store.calls] == ["acquire", "wait", "release"]


def test_what_was_never_asked_is_not_taken_back(world):
    """Where no connection could be made, the waiter does not try another to give up its place."""
    world.store.acquire = lambda *_, **__: (_ for _ in ()).throw(
        UnreachableError("redis://fake", "no answer to the TLS handshake")
    )
    with pytest.raises(UnreachableError):
        world.lock().acquire(Attempt("a", HOLDER), timeout=600)
    assert world.store.calls == []


@pytest.mark.parametrize("granted", ["nothing", "unknown"])
def test_a_lock_may_stay_taken_only_if_the_server_may_have_granted_it(world, caplog, granted):
    """An error that the server answered with, as for a wrong database, has granted nothing."""
    error = StoreError("redis://fake", "no such database")
    if granted == "nothing":
        error.raw = ResponseError("no such database")

    def refuse(*_args, **_kwargs):
        raise error

    world.store.acquire = world.store.release = refuse
    with pytest.raises(StoreError):
        acquire(world)
    assert ("may stay taken" in caplog.text) is (granted == "unknown")
