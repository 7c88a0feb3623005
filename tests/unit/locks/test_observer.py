"""What every observer is told, and what the one that is always there makes of it."""

from __future__ import annotations

from celery_dislock.locks.observer import Observer
from celery_dislock.servers.requests import Ending


def test_an_observer_is_told_of_a_lease_from_its_grant_to_its_end(world):
    """Each moment once, and in this order."""
    told = []

    class Notes(Observer):
        def acquired(self, lease, how, waited):
            told.append(("acquired", how, waited))

        def renewed(self, lease):
            told.append(("renewed", lease.renewals))

        def capped(self, lease, action):
            told.append(("capped", action))

        def lost(self, lease, action, *, gone):
            told.append(("lost", action, gone))

        def ended(self, lease, end, held):
            told.append((end, round(held)))

    world.watchdog.reports.observer = Notes()
    world.lease(lock_watchdog_timeout=3, max_renew_times=1).release()
    world.lease("left", lock_watchdog_timeout=3).release(Ending(expires=True))
    world.lease(lock_watchdog_timeout=3, max_renew_times=1)
    world.run(3)
    lost = world.lease("b", "other", lock_watchdog_timeout=3)
    world.store.answers["other"] = False
    world.run(3)
    lost.release()
    assert told == [
        ("acquired", "at_once", 0.0),
        ("released", 0),
        ("acquired", "at_once", 0.0),
        ("expiring", 0),
        ("acquired", "at_once", 0.0),
        ("renewed", 1),
        ("capped", "expire"),
        ("acquired", "at_once", 0.0),
        ("lost", "warn", True),
        ("lost", 1),
    ]
