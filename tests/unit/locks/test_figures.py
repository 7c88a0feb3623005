"""What a watchdog tells of its process."""

from __future__ import annotations

import json
import time

import pytest

from celery_dislock.config.options import TaskOptions
from celery_dislock.locks.attempt import Attempt
from celery_dislock.locks.figures import LISTED, SHOW_EVERY, read, written
from celery_dislock.locks.lock import Lock
from celery_dislock.locks.renewals import Counts


def test_a_lease_is_told_with_seconds(world):
    """Key, task and token are told, for how long the lock is held, and how long it is trusted."""
    lease = world.lease("export:7", lock_watchdog_timeout=30)
    world.run(11)
    told = read(world.watchdog.showing.figures(), world.clock.now)
    assert told["held"] == 1
    assert told["leases"] == [
        {
            "key": "export:7",
            "task": "t",
            "id": "1",
            "thread": None,
            "token": lease.token,
            "renewals": 1,
            "held_for": pytest.approx(11),
            "remaining": pytest.approx(lease.remaining, abs=0.01),
        }
    ]


def test_figures_that_were_written_earlier_tell_the_time_of_now(world):
    """A file of five seconds ago tells a lease that is five seconds older."""
    world.lease(lock_watchdog_timeout=30)
    file = json.dumps(world.watchdog.showing.figures())
    [lease] = read(json.loads(file), world.clock.now + 5)["leases"]
    assert lease["held_for"] == 5
    [lease] = read(json.loads(file), world.clock.now + 60)["leases"]
    assert lease["remaining"] == 0


def test_the_clock_of_all_processes_is_used(world):
    """Wall-clock time, which people are shown elsewhere, may be set while a lock is held."""
    lock = Lock(["k"], ["dislock:{k}"], TaskOptions(), world.store, world.watchdog, time.monotonic)
    assert lock.try_acquire(Attempt("o", {"task": "t"}))
    [lease] = read(world.watchdog.showing.figures(), time.monotonic())["leases"]
    assert 0 <= lease["held_for"] < 60
    assert 0 < lease["remaining"] <= 30


def test_the_lateness_of_renewals_is_told(world):
    """A loop that was held up for four seconds has renewed four seconds late, at worst."""
    world.lease(lock_watchdog_timeout=30)
    world.clock.advance(14)
    world.watchdog.tick()
    world.run(20)
    told = world.watchdog.showing.figures()
    assert told["worst_late"] == pytest.approx(4)
    assert told["late"] == pytest.approx(0, abs=0.1)
    assert told["renewals"] == 3


def test_outages_are_counted_once_each(world):
    """Many failed renewals in a row are one outage."""
    world.lease(lock_watchdog_timeout=30)
    world.store.away = True
    world.run(12)
    world.store.away = False
    world.run(12)
    told = world.watchdog.showing.figures()
    assert told["outages"] == 1
    assert told["failed_renewals"] >= 2
    assert told["worst_late"] > 0


def test_many_leases_are_counted_and_the_oldest_listed(world):
    """A process with thousands of leases gives a short answer."""
    for number in range(LISTED + 10):
        world.lease(f"k{number}", f"o{number}")
        world.clock.advance(0.01)
    told = world.watchdog.showing.figures()
    assert told["held"] == LISTED + 10
    assert len(told["leases"]) == LISTED
    assert told["leases"][0]["key"] == "k0"


def test_a_process_without_leases_has_figures():
    """Nothing is held, and nothing was late."""
    told = written(7, [], Counts(), 0)
    assert (told["pid"], told["held"], told["leases"], told["worst_late"]) == (7, 0, [], 0)


class TestShowing:
    """The loop shows the figures; here the test is the loop."""

    @pytest.fixture
    def shown(self, world):
        shown = []
        world.watchdog.showing.show = shown.append
        world.watchdog.tick()
        return shown

    def test_an_idle_process_shows_nothing_and_sleeps(self, world, shown):
        """No lease: no timer runs, and no file is written."""
        assert world.watchdog.tick() is None
        world.clock.advance(1000)
        assert world.watchdog.tick() is None
        assert len(shown) == 1

    def test_a_lease_wakes_the_loop_and_is_shown(self, world, shown):
        """The first lease after a pause is shown at once."""
        world.clock.advance(5)
        world.watchdog.tick()
        world.lease()
        assert world.watchdog._bell._silent.acquire(blocking=False)  # it rang
        world.watchdog.tick()
        assert [one["held"] for one in shown] == [0, 1]

    def test_many_short_leases_are_shown_once_a_second(self, world, shown):
        """They neither wake the loop again nor make it write again."""
        world.clock.advance(5)
        world.watchdog.tick()
        world.lease("k0", "o0").release()
        world.watchdog.tick()
        world.lease("k1", "o1").release()
        world.watchdog._bell._silent.acquire(blocking=False)
        assert world.watchdog.tick() == SHOW_EVERY
        for number in range(2, 100):
            world.lease(f"k{number}", f"o{number}").release()
        assert not world.watchdog._bell._silent.acquire(blocking=False)
        world.watchdog.tick()
        assert len(shown) == 2
        world.clock.advance(SHOW_EVERY)
        world.watchdog.tick()
        assert len(shown) == 3

    def test_the_end_of_a_lease_is_shown_within_a_second(self, world, shown):
        """A release does not wake the loop, so it looks each second while something is held."""
        world.clock.advance(5)
        lease = world.lease(lock_watchdog_timeout=3000)
        world.watchdog.tick()
        lease.release()
        assert world.watchdog.tick() <= SHOW_EVERY
        world.clock.advance(SHOW_EVERY)
        world.watchdog.tick()
        assert [one["held"] for one in shown] == [0, 1, 0]

    def test_a_held_lease_is_not_written_again_and_again(self, world, shown):
        """Nothing changes between two renewals."""
        world.clock.advance(5)
        world.lease(lock_watchdog_timeout=3000)
        for _ in range(100):
            world.watchdog.tick()
            world.clock.advance(SHOW_EVERY)
        assert len(shown) == 2
