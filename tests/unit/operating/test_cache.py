"""One reading for all who look."""

import pytest

from celery_dislock.exceptions import DamagedLockError, StoreError
from celery_dislock.operating.web import cache
from celery_dislock.operating.web.cache import FRESH, Cache

AWAY = StoreError("redis://fake", "no answer in time")


class Source:
    """Counts how often it is read; each reading takes some seconds, of a clock of its own."""

    def __init__(self, seconds=FRESH):
        self.now = 1000.0
        self.cache = Cache(seconds, lambda: self.now)
        self.readings = 0
        self.takes = 0.0
        self.error = None
        self.meanwhile = lambda: None

    def __call__(self):
        self.readings += 1
        self.meanwhile()
        self.now += self.takes
        if self.error:
            raise self.error
        return self.readings

    def get(self):
        return self.cache.get("list", self)


@pytest.fixture
def source():
    return Source()


def test_one_reads_while_the_others_get_the_last_reading(source):
    """Nobody waits for a reading once there is one."""
    source.get()
    source.now += FRESH
    seen = []
    source.meanwhile = lambda: seen.append(source.get().value)
    assert source.get().value == 2
    assert seen == [1]


def test_what_was_changed_is_read_again(source):
    """Also if it was changed while a reading was under way, which may have missed the change."""
    source.get()
    source.now += 0.1
    source.cache.forget()
    assert source.get().value == 2
    source.takes = 0.1
    source.meanwhile = source.cache.forget
    source.now += FRESH
    assert source.get().value == 3
    assert source.get().value == 4


def test_an_outage_keeps_the_last_reading(source):
    """It comes with its age and the reason; the server is asked once in a while, and comes back."""
    source.get()
    source.error = AWAY
    source.now += FRESH
    for _ in range(5):
        kept = source.get()
        assert (kept.value, kept.age, kept.away) == (1, FRESH, AWAY)
    assert source.readings == 2
    source.error = None
    source.now += FRESH
    assert (source.get().value, source.get().away) == (3, None)


def test_an_outage_with_nothing_to_show_is_an_error(source):
    """It is raised to all who ask, and the server is asked once."""
    source.error = AWAY
    for _ in range(5):
        with pytest.raises(StoreError):
            source.get()
    assert source.readings == 1


def test_damage_is_no_outage(source):
    """Who looks at a damaged lock is told what is wrong with it now."""
    source.get()
    source.error = DamagedLockError("redis://fake", "wrong type", "dislock:{a}")
    source.now += FRESH
    for _ in range(2):
        with pytest.raises(DamagedLockError):
            source.get()
    source.error = None
    assert source.get().away is None


def test_the_number_of_things_that_are_kept_is_bounded(source, monkeypatch):
    """Those that were asked for last stay."""
    monkeypatch.setattr(cache, "KEPT_MOST", 2)
    kept = Cache()
    for what in "abca":
        kept.get(what, source)
    assert list(kept._entries) == ["c", "a"]
