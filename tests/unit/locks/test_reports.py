"""What is reported of leases, and by whom."""

from __future__ import annotations

import pytest

from celery_dislock import signals


def names(events):
    return [name for name, _ in events if name != "lock_acquired"]


def test_reports_can_be_made_elsewhere(world, heard):
    """Beside greenlets the loop only notes what it has to say; its work does not wait for that."""
    notes = []
    world.watchdog.report_to = notes.append
    lease = world.lease(lock_watchdog_timeout=30)
    capped = world.lease("capped", "capped", lock_watchdog_timeout=30, max_renew_times=1)
    world.run(25)
    world.store.answers["me"] = False
    world.run(10)
    assert lease.lost
    assert capped.capped
    assert names(heard) == []
    for note in notes:
        note()
    assert sorted(names(heard)) == ["lock_capped", "lock_lost", *["lock_renewed"] * 3]


def test_a_loss_is_reported_with_reason_and_action(world, heard, caplog):
    """The log names key, task and why; the body is stopped even if a receiver raises."""
    lease = world.lease(lock_on_lost="raise")
    actions = []
    lease.on_end = lambda _lease, action: actions.append(action)
    lease.lose("stolen")
    world.watchdog.reports.lost(lease)
    assert names(heard) == ["lock_lost"]
    assert heard[-1][1]["reason"] == "stolen"
    assert actions == ["raise"]
    assert "'k' of t[1] on w (pid 7) is lost: stolen" in caplog.text


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_a_receiver_that_raises_harms_nothing(world, receiving, error):
    """A bug in a user's signal receiver does not stop the watchdog or the lease."""

    def receiver(**_):
        raise error

    lease = world.lease(lock_watchdog_timeout=30)
    with receiving(signals.lock_renewed, receiver):
        world.run(25)
    assert lease.renewals == 2
    assert lease.held
