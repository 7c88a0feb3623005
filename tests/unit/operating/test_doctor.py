"""How the checks come together."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from celery_dislock.exceptions import StoreError
from celery_dislock.operating import doctor
from celery_dislock.operating.checks.workers import Fleet
from celery_dislock.operating.doctor import Asking, Examined, Place, examine
from celery_dislock.operating.findings import Finding

OURS = {"version": "1", "server": "redis://h", "prefix": "p", "no_server": None, "tasks": {}}


@pytest.fixture
def away():
    """A lock server that does not answer."""

    def send(*_command):
        raise StoreError("redis://h", "no answer in time")

    return SimpleNamespace(
        name="redis://h",
        kind="single",
        keeps_lines=True,
        members=lambda: [("redis://h", send)],
        senders=lambda: [send],
    )


def test_without_the_lock_server_the_workers_are_judged(away):
    """No lock is looked at, and no right is tried."""

    def empty():
        raise AssertionError("nobody is asked")

    asking = Asking(Fleet({}, {}, "Connection refused"), lambda _ids: set(), empty)
    examined = examine(Place(away, "p", "", 0), OURS, asking)
    assert examined.away
    assert [one.check for one in examined.findings] == ["server", "workers", "tasks"]


def test_the_most_serious_come_first():
    """What somebody reads at 3 a.m. is on top."""
    found = [Finding("a", "ok", ""), Finding("b", "serious", "")]
    assert not Examined(found[:1], away=False).serious
    assert Examined(found, away=False).serious


@pytest.mark.parametrize(
    ("tasks", "old"),
    [
        ({}, 1800.0),
        ({"t": {"lock_unique_for": 20.0}}, 1800.0),  # it reserves nothing
        ({"t": {"lock_unique_until": "start"}}, 1800.0),
        ({"t": {"lock_unique_until": "end", "lock_unique_for": 20.0}}, 10.0),
    ],
)
def test_when_a_reservation_is_old(tasks, old):
    """After half of the shortest lock_unique_for that is known."""
    assert doctor._old([{"tasks": tasks}]) == old
