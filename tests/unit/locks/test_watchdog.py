"""The jobs of a watchdog, driven tick by tick."""

from __future__ import annotations

import logging

import pytest

from celery_dislock.clock import FOREVER
from celery_dislock.locks.channel import Channel, Watcher
from celery_dislock.locks.watchdog import Watchdog


class Due(Watcher):
    """Wants to be run some seconds after a lease was taken, and notes when it was."""

    AFTER = 5.0

    def __init__(self, world):
        self.world = world
        self.channel = Channel()
        self.channel.watchers, self.channel.watched = [self], True
        self.when = FOREVER
        self.again = FOREVER
        self.ran = []
        self.renewals = []

    def acquired(self, lease, how, waited):
        self.when = min(self.when, self.world.clock.now + self.AFTER)
        self.channel.wake()

    def renewed(self, lease):
        self.renewals.append(lease)

    def due_at(self):
        return self.when

    def run(self):
        self.ran.append(self.world.clock.now)
        self.when = self.again


@pytest.fixture
def watcher(world):
    """The watcher of a watchdog that ticks when told to."""
    watcher = Due(world)
    world.watchdog = Watchdog(
        world.store, clock=world.clock, threaded=False, channel=watcher.channel
    )
    return watcher


def test_a_watcher_works_when_it_is_due(world, watcher):
    """The loop sleeps until then; where nothing happens, it sleeps for good."""
    world.run(600)
    assert world.watchdog.tick() is None
    began = world.clock.now
    for number in range(10):
        lease = world.lease(f"k{number}", f"o{number}")
        lease.release()
    world.run(60)
    assert watcher.ran == [began + Due.AFTER]


def test_renewals_go_before_the_watchers(world, watcher):
    """While the server does not answer, the time is needed for leases that are still trusted."""
    world.lease(lock_watchdog_timeout=9)
    world.store.away = True
    world.run(8)
    assert watcher.ran == []
    world.store.away = False
    world.run(Due.AFTER + 1)
    assert len(watcher.ran) == 1


def test_a_watcher_works_once_no_lease_is_left_to_renew(world, watcher):
    """An outage has ended all leases: no renewal will succeed that could say that it is over."""
    world.lease(lock_watchdog_timeout=9)
    world.store.away = True
    world.run(30)
    assert len(world.watchdog) == 0
    assert len(watcher.ran) == 1


def test_an_error_of_a_watcher_ends_no_loop(world, watcher, caplog):
    """Leases are renewed all the same."""
    watcher.again, watcher.ran = 0.0, None  # it raises each time
    lease = world.lease(lock_watchdog_timeout=30)
    with caplog.at_level(logging.ERROR):
        world.watchdog.tick()
        world.clock.advance(Due.AFTER)
        for _ in range(3):
            world.watchdog.tick()
        watcher.when = FOREVER
        world.run(100)
    assert lease.held
    assert set(watcher.renewals) == {lease}
    assert world.watchdog.errors == 3
    assert "running telemetry" in caplog.text
