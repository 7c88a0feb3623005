"""What one process has that can park tasks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from celery.app.task import Context

from celery_dislock.config.settings import AppSettings
from celery_dislock.parking.process import ParkingProcess
from celery_dislock.servers.reservations import Reservation
from tests.unit.deliveries import noted
from tests.unit.fakes import FakeClock, FakeReservations

HEADER = ["dislock:{k}", "end", "ab", 3]
SEVERAL = ["redis://a", "redis://b", "redis://c"]


class Publisher:
    """Notes what it is given."""

    home = "broker"

    def __init__(self):
        self.given = []

    def hand_over(self, lines, turns):
        self.given.append((lines, turns))

    def tell_replaced(self, lines, lock, replaced, end_reservation):
        self.given.append((lines, lock, replaced, end_reservation))
        return {"t": "why"}

    def end_unclaimed(self, lines, lock, tickets):
        self.given.append((lines, lock, tickets))


@pytest.fixture
def publisher():
    return Publisher()


def process(publisher, url="redis://a"):
    return ParkingProcess({"dislock_url": url}, AppSettings(), publisher)


@pytest.mark.parametrize(("known", "url"), [(True, SEVERAL), (False, "redis://a")])
def test_without_a_publisher_or_with_several_servers_nothing_is_parked(publisher, known, url):
    """Neither has a line; what would be published is dropped without an error."""
    made = process(publisher if known else None, url)
    assert not made.can_park
    assert made.store.home == ""
    made._hand_over(["turn"])
    made.tell_replaced("lock", {"t:0": b"m"})
    made.end_unclaimed("lock", ["t:0"])
    assert publisher.given == []


@pytest.mark.parametrize("away", [False, True])
def test_a_message_that_ends_frees_its_key(publisher, caplog, away):
    """Within a second, as whoever ends it does something else; a key that stays taken is logged."""
    made = process(publisher)
    made.quick_store = SimpleNamespace(reservations=FakeReservations(FakeClock()))
    there = made.quick_store.reservations
    there.away = away
    made.end_reservation(Context(id="a", task="t", **noted(unique=HEADER)))
    made.end_reservation(Context(id="b", task="t", **noted(unique="forged")))
    made.end_reservation(Context(id="c", task="t"))
    assert there.asked == [("end", Reservation("dislock:{k}", "a", "end", 0.0, "ab", 3))]
    assert [text.split(":")[0] for text in caplog.messages] == away * [
        "Task t[a] has ended, and its key 'k' stays reserved until that expires"
    ]
