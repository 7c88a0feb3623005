"""The jobs of a watchdog, driven tick by tick."""

from __future__ import annotations

import logging

import pytest

from celery_dislock.clock import FOREVER
from celery_dislock.locks.observer import Observer
from celery_dislock.locks.watchdog import Watchdog


class Due(Observer):
    """Wants to be run some seconds after a lease was taken, and notes when it was."""

    AFTER = 5.0

    def __init__(self, world):
        super().__init__()
        self.world = world
        self.when = FOREVER
        self.again = FOREVER
        self.ran = []
        self.renewals = []

    def acquired(self, lease, how, waited):
        self.when = min(self.when, self.world.clock.now + self.AFTER)
        self.wake()

    def renewed(self, lease):
        self.renewals.append(lease)

    def due_at(self):
        return self.when

    def run(self):
        self.ran.append(self.world.clock.now)
        self.when = self.again


@pytest.fixture
def observer(world):
    """The observer of a watchdog that ticks when told to."""
    observer = Due(world)
    world.watchdog = Watchdog(world.store, clock=world.clock, threaded=False, observer=observer)
    return observer


def test_the_observer_is_run_when_it_is_due(world, observer):
    """The loop sleeps until then; where nothing happens, it sleeps for good."""
    world.run(600)
    assert world.watchdog.tick() is None
    began = world.clock.now
    for number in range(10):
        lease = world.lease(f"k{number}", f"o{number}")
        lease.release()
    world.run(60)
    assert observer.ran == [began + Due.AFTER]


def test_renewals_go_before_the_observer(world, observer):
    """While the server does not answer, the time is needed for leases that are still trusted."""
    world.lease(lock_watchdog_timeout=9)
    world.store.away = True
    world.run(8)
    assert observer.ran == []
    world.store.away = False
    world.run(Due.AFTER + 1)
    assert len(observer.ran) == 1


def test_the_observer_is_run_once_no_lease_is_left_to_renew(world, observer):
    """An outage has ended all leases: no renewal will succeed that could say that it is over."""
    world.lease(lock_watchdog_timeout=9)
    world.store.away = True
    world.run(30)
    assert len(world.watchdog) == 0
    assert len(observer.ran) == 1


def test_an_error_of_the_observer_ends_no_loop(world, observer, caplog):
    """Leases are renewed all the same."""
    observer.again, observer.ran = 0.0, None  # it raises each time
    lease = world.lease(lock_watchdog_timeout=30)
    with caplog.at_level(logging.ERROR):
        world.watchdog.tick()
        world.clock.advance(Due.AFTER)
        for _ in range(3):
            world.watchdog.tick()
        observer.when = FOREVER
        world.run(100)
    assert lease.held
    assert set(observer.renewals) == {lease}
    assert world.watchdog.errors == 3
    assert "running the observer" in caplog.text
