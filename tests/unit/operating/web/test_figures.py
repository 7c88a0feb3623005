"""The last hour, from counters that only grow."""

from __future__ import annotations

import pytest

from celery_dislock.exceptions import StoreError
from celery_dislock.operating.web.figures import (
    ACQUISITIONS,
    AGAIN,
    CONFLICTS,
    EVERY,
    HOUR,
    LOST,
    LastHour,
)
from tests.unit.fakes import FakeClock


class Counted:
    """The counters of all workers."""

    def __init__(self):
        self.values = {}
        self.readings = 0

    def add(self, name, task, outcome, number=1, worker="w1"):
        by_labels = self.values.setdefault(name, {})
        by_labels[task, worker, outcome] = by_labels.get((task, worker, outcome), 0) + number

    def __call__(self):
        self.readings += 1
        return {name: dict(by_labels) for name, by_labels in self.values.items()}


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def counted():
    return Counted()


@pytest.fixture
def hour(counted, clock):
    return LastHour(counted, clock)


def of(hour, task="a"):
    """Return what is told of a task."""
    (told,) = [one for one in hour()["tasks"] if one["task"] == task]
    return tuple(told[column] for column in ("acquired", "refused", "parked", "lost"))


def test_nobody_counts(hour, clock):
    """That is told, instead of noughts, however long the page is open."""
    for _ in range(3):
        assert hour() is None
        clock.advance(EVERY)


def test_what_was_counted_before_is_not_of_this_hour(hour, counted):
    """It may be of last week."""
    counted.add(ACQUISITIONS, "a", "at_once", 1000)
    assert hour()["tasks"] == []
    counted.add(ACQUISITIONS, "a", "at_once", 3)
    assert of(hour) == (3, 0, 0, 0)


def test_each_column_adds_up_its_counters(hour, counted):
    """Of all workers and outcomes; what is parked is not counted as refused as well."""
    hour()
    counted.add(ACQUISITIONS, "a", "at_once", 2)
    counted.add(ACQUISITIONS, "a", "waited", 1, worker="w2")
    counted.add(CONFLICTS, "a", "skip", 4)
    counted.add(CONFLICTS, "a", "retry", 5)
    counted.add(CONFLICTS, "a", "queue", 6)
    counted.add(LOST, "a", "gone", 7)
    counted.add("celery_dislock_renewals_total", "a", "", 99)
    assert of(hour) == (3, 9, 6, 7)


def test_an_hour_later_it_is_forgotten(hour, counted, clock):
    """What is older than that counts no more."""
    hour()
    counted.add(ACQUISITIONS, "a", "at_once", 5)
    for _ in range(int(HOUR / EVERY)):
        assert of(hour) == (5, 0, 0, 0)
        clock.advance(EVERY)
        hour.note()
    counted.add(ACQUISITIONS, "a", "at_once", 1)
    clock.advance(EVERY)
    assert of(hour) == (1, 0, 0, 0)
    assert hour()["seconds"] == HOUR


def test_it_says_for_how_long_it_has_counted(hour, clock):
    """A page that was started just now knows nothing of the time before."""
    hour.note()
    clock.advance(60)
    assert hour() is None
    hour._read.add(ACQUISITIONS, "a", "at_once")
    assert hour()["seconds"] == 60


def test_notes_are_minutes_apart(hour, counted, clock):
    """However often the page is looked at."""
    for _ in range(100):
        hour.note()
        clock.advance(1)
    assert counted.readings == 1


def test_a_lock_server_that_is_away_is_not_asked_for_each_reader(counted, clock):
    """What was not noted is in the next note."""

    def fail():
        counted.readings += 1
        raise StoreError("redis://fake", "no answer in time")

    hour = LastHour(counted, clock)
    hour.note()
    counted.add(ACQUISITIONS, "a", "at_once", 3)
    clock.advance(EVERY)
    hour._read = fail
    with pytest.raises(StoreError):
        hour.note()
    for _ in range(20):
        hour.note()
        clock.advance(1)
    assert counted.readings == 2
    hour._read = counted
    clock.advance(AGAIN)
    hour.note()
    assert of(hour) == (3, 0, 0, 0)


def test_a_counter_that_began_anew_does_not_count_backwards(hour, counted):
    """Its worker was started again."""
    counted.add(ACQUISITIONS, "a", "at_once", 1000)
    hour()
    counted.values[ACQUISITIONS]["a", "w1", "at_once"] = 2
    assert of(hour) == (2, 0, 0, 0)
    del counted.values[ACQUISITIONS]
    assert hour() is None or hour()["tasks"] == []


def test_those_that_did_most_come_first(hour, counted):
    """And their number is bounded."""
    hour()
    for number in range(1, 301):
        counted.add(ACQUISITIONS, f"t{number}", "at_once", number)
    told = hour()["tasks"]
    assert [one["task"] for one in told[:2]] == ["t300", "t299"]
    assert len(told) == 200
