"""What is reported of leases, and by whom."""

from __future__ import annotations

import pytest

from celery_dislock import signals


def names(events):
    return [name for name, _ in events if name != "lock_acquired"]


def test_reports_can_be_made_elsewhere(world, heard):
    """Beside greenlets the loop only notes what it has to say; its work does not wait for that."""
    notes = []
    world.watchdog._report_to = notes.append
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


@pytest.mark.parametrize(
    ("report", "what"), [("lost", "is lost: stolen"), ("capped", "was renewed 0 times, its cap")]
)
def test_an_end_is_reported_with_its_action(world, heard, caplog, report, what):
    """The log names key, task and why; whoever runs the body is given the action of its task."""
    lease = world.lease(lock_on_lost="raise", lock_on_cap="raise")
    actions, gone = [], []
    world.watchdog.reports.observer.lost = lambda *_, **told: gone.append(told["gone"])
    lease.on_end = lambda _lease, action: actions.append(action)
    if report == "lost":
        lease.lose("stolen")
    getattr(world.watchdog.reports, report)(lease)
    [(name, told)] = [event for event in heard if event[0] != "lock_acquired"]
    assert (name, told["lease"]) == (f"lock_{report}", lease)
    assert told.get("reason", "stolen") == "stolen"
    assert actions == ["raise"]
    assert gone == [False] * (report == "lost")
    assert f"'k' of t[1] on w (pid 7) {what}" in caplog.text


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
