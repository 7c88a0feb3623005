"""A lock and its leases, on a store that the test drives."""

from __future__ import annotations

import pytest

from celery_dislock.exceptions import LockLostError
from celery_dislock.locks import lease as lease_module
from celery_dislock.servers.requests import Ending
from celery_dislock.servers.reservations import Reservation

HOLDER = {"task": "shop.export", "id": "1", "worker": "w1", "pid": 7}


def names(events):
    return [name for name, _ in events]


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


def test_a_lease_that_expires_while_its_release_is_on_its_way_was_held(world, heard):
    """A hub that computes, or a connection that is made anew: the body has ended before."""
    lease = world.lease(lock_watchdog_timeout=30)
    world.store.latency = 40
    lease.release()
    assert not lease.lost
    assert names(heard) == ["lock_acquired", "lock_released"]


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


def test_a_release_that_failed_is_sent_again_as_it_was(world, heard, caplog):
    """By the watchdog: whoever held the lock may hang since; no error spoils the task's result."""
    lease = world.lease(lock_watchdog_timeout=30)
    reservation = Reservation("dislock:{k}", "1", mark="m", number=1)
    world.store.away = True
    lease.release(Ending(ticket="1:0:0", settles=7.0, reservation=reservation))
    world.store.away = False
    world.run(2)
    assert "dislock:{k}" not in world.store.leases
    assert world.store.done == ["1:0:0"]
    assert world.store.settling == [7.0]
    assert ("end", reservation) in world.store.reservations.asked
    assert "ends by itself within 30.0 s" in caplog.text
    assert names(heard) == ["lock_acquired", "lock_released"]


def test_an_end_after_a_minimum_is_sent_again_as_it_was(world):
    """What was to last longer lasts as long; the main process cannot renew it any more."""
    lease = world.lease(lock_watchdog_timeout=30, lock_at_least_for=60)
    world.store.away = True
    lease.release()
    world.store.away = False
    world.run(2)
    owner, expires, _ = world.store.leases["dislock:{k}"]
    assert owner == "~me"
    assert expires > world.clock() + 50


@pytest.mark.parametrize(("of_options", "of_ending"), [(60, 20), (20, 60)])
def test_the_longer_minimum_holds(world, of_options, of_ending):
    """A release may ask for a minimum beside that of the options."""
    lease = world.lease(lock_at_least_for=of_options)
    lease.release(Ending(at_least=of_ending))
    assert world.store.asked("release") == [("dislock:{k}", "me", 60)]


def test_a_lease_that_is_left_is_marked_and_not_renewed(world, heard):
    """It ends a timeout after its last renewal, to the millisecond, and nobody else renews it."""
    world.clock.advance(0.003)  # then a sum of floats is a little more than 30 s
    lease = world.lease()
    lease.release(Ending(expires=True))
    world.run(100)
    assert world.store.asked("release") == [("dislock:{k}", "me", 30)]
    assert [call[0] for call in world.store.calls] == ["acquire", "release"]
    assert heard[-1][0] == "lock_released"
    assert heard[-1][1]["expiring"] is True


def test_when_a_lease_was_acquired_is_unix_time(world, monkeypatch):
    """For people: the time of the machine's clock, also if that was corrected since."""
    monkeypatch.setattr(lease_module.time, "monotonic", world.clock)
    monkeypatch.setattr(lease_module.time, "time", lambda: 1_700_000_000.0 + world.clock.now)
    lease = world.lease()
    acquired = 1_700_000_000.0 + world.clock.now
    world.clock.advance(20)
    assert lease.acquired_at == pytest.approx(acquired)
    monkeypatch.setattr(lease_module.time, "time", lambda: 1_700_003_600.0 + world.clock.now)
    assert lease.acquired_at == pytest.approx(acquired + 3600)


def test_a_lease_meets_one_end(world, heard):
    """A lease that was found lost while its owner released it is lost, not released as well."""
    lease = world.lease()
    unwatch = world.watchdog.renewals.unwatch

    def lost_meanwhile(lease):
        unwatch(lease)
        lease.lose("stolen")

    world.watchdog.renewals.unwatch = lost_meanwhile
    lease.release()
    world.watchdog.channel.lost(lease)
    assert names(heard) == ["lock_acquired", "lock_lost"]
