"""One reading for all who look."""

from __future__ import annotations

import itertools

import pytest

from celery_dislock.exceptions import DamagedLockError, StoreError
from celery_dislock.operating.web.shared import AWAY, FRESH, SHARE, Outage, Shared
from tests.unit.fakes import FakeClock


class Source:
    """Counts how often it is read; each reading takes some seconds."""

    def __init__(self, clock):
        self.clock = clock
        self.readings = 0
        self.takes = 0.0
        self.error = None
        self.meanwhile = lambda: None

    def __call__(self):
        self.readings += 1
        self.meanwhile()
        self.clock.advance(self.takes)
        if self.error:
            raise self.error
        return self.readings


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def source(clock):
    return Source(clock)


@pytest.fixture
def shared(source, clock):
    return Shared(source, Outage(), clock=clock)


def test_all_who_ask_within_seconds_get_one_reading(shared, source, clock):
    """A hundred open pages cost as much as one."""
    for _ in range(100):
        assert shared.get().value == 1
        clock.advance(FRESH / 101)
    clock.advance(FRESH)
    assert shared.get().value == 2
    assert source.readings == 2


def test_a_reading_that_takes_long_is_kept_for_longer(shared, source, clock):
    """So that reading takes a bounded part of the server's time."""
    source.takes = 10.0
    shared.get()
    clock.advance(10 * SHARE - 1)
    assert shared.get().value == 1
    clock.advance(2)
    assert shared.get().value == 2


def test_a_quick_reading_need_not_be_kept(source, clock):
    """Of metrics each scrape is new, unless reading them takes long."""
    shared = Shared(source, Outage(), fresh=0.0, quick=0.25, clock=clock)
    assert [shared.get().value for _ in range(3)] == [1, 2, 3]
    source.takes = 10.0
    assert [shared.get().value for _ in range(3)] == [4, 4, 4]


def test_the_age_counts_from_when_the_reading_began(shared, source, clock):
    """The first lock was looked at then."""
    source.takes = 2.0
    assert shared.get().age == 2.0


def test_others_get_the_last_reading_while_one_reads(shared, source, clock):
    """Nobody waits for what somebody else is reading."""
    shared.get()
    clock.advance(FRESH)
    seen = []
    source.meanwhile = lambda: seen.append(shared.get().value)
    assert shared.get().value == 2
    assert seen == [1]


def test_the_last_reading_is_shown_while_the_server_is_away(shared, source, clock):
    """With its age and the reason; the server is asked less and less often."""
    shared.get()
    source.error = StoreError("redis://fake", "no answer in time")
    clock.advance(FRESH)
    reading = shared.get()
    assert (reading.value, reading.age, reading.away) == (1, FRESH, source.error)
    times = []
    for _ in range(200):
        clock.advance(1)
        before = source.readings
        shared.get()
        if source.readings > before:
            times.append(clock.now)
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert pauses[:3] == [4.0, 8.0, 16.0]
    assert set(pauses[3:]) == {AWAY[1]}
    source.error = None
    clock.advance(AWAY[1])
    assert shared.get().away is None


def test_with_nothing_to_show_the_error_is_raised(shared, source, clock):
    """Also for those who ask before the server is asked again."""
    source.error = StoreError("redis://fake", "no answer in time")
    for _ in range(3):
        with pytest.raises(StoreError):
            shared.get()
    assert source.readings == 1


def test_a_change_is_read_at_once(shared, source):
    """Unless the server is away."""
    shared.get()
    shared.forget()
    assert shared.get().value == 2
    source.error = StoreError("redis://fake", "no answer in time")
    shared.forget()
    shared.get()
    shared.forget()
    shared.get()
    assert source.readings == 3


def test_an_outage_is_met_once_for_all(source, clock):
    """Whoever looks at something else does not wait for the same server."""
    outage = Outage()
    first, second = Shared(source, outage, clock=clock), Source(clock)
    source.error = StoreError("redis://fake", "no answer in time")
    with pytest.raises(StoreError):
        first.get()
    with pytest.raises(StoreError):
        Shared(second, outage, clock=clock).get()
    assert second.readings == 0
    clock.advance(AWAY[0])
    assert Shared(second, outage, clock=clock).get().value == 1
    source.error = None
    assert first.get().value == 2


def test_what_is_damaged_is_no_outage(shared, source):
    """The server answered; the error is for who asked for that."""
    source.error = DamagedLockError("redis://fake", "wrong type", "dislock:{a}")
    for _ in range(2):
        with pytest.raises(DamagedLockError):
            shared.get()
    assert source.readings == 2
    source.error = None
    assert shared.get().away is None
