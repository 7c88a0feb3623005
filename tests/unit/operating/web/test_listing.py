"""The list of locks: searched, sorted and cut."""

from __future__ import annotations

import pytest

from celery_dislock.exceptions import DamagedLockError, StoreError
from celery_dislock.operating.web import listing
from celery_dislock.operating.web.listing import Listing
from tests.pages import RESERVED, FakeOverview, holder, lock


@pytest.fixture
def overview():
    fake = FakeOverview()
    fake.add(
        lock("b", holders=[holder(2)], waiting=1),
        lock("a", holders=[holder(1, worker="celery@W2"), holder(3)]),
        lock("c", limit=0, aside=2),
        lock("d", reservation=RESERVED),
        lock("gone"),
    )
    fake.known["dislock:{e}"] = DamagedLockError("redis://fake", "wrong type", "dislock:{e}")
    return fake


def keys(rows):
    return "".join(row.key for row in rows)


@pytest.mark.parametrize(
    ("search", "found"),
    [
        ("", "abcde"),
        ("shop.export", "ab"),
        ("SHOP id-2", "b"),
        ("celery@w2", "a"),
        ("id-9", "d"),
        ("e", "abe"),
        ("nothing", ""),
        (" ".join("abcdefghij"), ""),
    ],
)
def test_a_search_looks_into_key_task_id_and_worker(overview, search, found):
    """All words must be there, in any case; a lock that has ended is not listed."""
    assert keys(Listing.read(overview).find(search, "all", "key")) == found


@pytest.mark.parametrize(
    ("shown", "found"),
    [
        ("held", "ab"),
        ("line", "b"),
        ("limited", "c"),
        ("reserved", "d"),
        ("trouble", "ce"),
        ("paused", "c"),
        ("damaged", "e"),
        ("overdue", ""),
    ],
)
def test_a_kind_of_locks_can_be_chosen(overview, shown, found):
    """What is held, what waits, what an operator has changed, what is wrong."""
    assert keys(Listing.read(overview).find("", shown, "key")) == found


@pytest.mark.parametrize(
    ("order", "found"),
    [("key", "abcde"), ("held", "abcde"), ("waiting", "bacde"), ("trouble", "ecabd")],
)
def test_each_lock_has_its_place_in_each_order(overview, order, found):
    """What is equal in it comes by key, so pages neither skip nor repeat a lock."""
    known = Listing.read(overview)
    assert keys(known.find("", "all", order)) == found
    assert keys(known.find("", "all", order)) == found


def test_what_can_be_chosen_is_counted(overview):
    """So that a page shows at a glance whether something is wrong."""
    overview.add(lock("f", holders=[holder(4, renewed=25.0, remaining=5.0), holder(5)]))
    known = Listing.read(overview)
    assert known.totals == {
        "held": 3,
        "line": 1,
        "overdue": 1,
        "paused": 1,
        "reserved": 1,
        "damaged": 1,
    }
    assert keys(known.find("", "overdue", "trouble")) == "f"
    assert keys(known.find("", "all", "trouble")) == "efcabd"


def test_searches_that_are_remembered_are_bounded(overview, monkeypatch):
    """Somebody who types makes a search of each letter."""
    monkeypatch.setattr(listing, "FOUND_MOST", 3)
    known = Listing.read(overview)
    for number in range(10):
        assert known.find(f"nothing {number}", "all", "key") == []
    assert keys(known.find("", "all", "key")) == "abcde"
    assert len(known._found) <= 3


def test_there_is_a_limit(overview, monkeypatch):
    """The list says that there are more."""
    overview.add(*(lock(f"x{number}", holders=[holder()]) for number in range(300)))
    assert not Listing.read(overview).is_cut
    monkeypatch.setattr(listing, "LOCKS_MOST", 150)
    known = Listing.read(overview)
    assert known.is_cut
    assert 150 <= len(known) <= 250


def test_a_server_that_does_not_answer_is_no_damaged_lock(overview):
    """Half a list would look whole."""
    overview.known["dislock:{e}"] = StoreError("redis://fake", "no answer in time")
    with pytest.raises(StoreError):
        Listing.read(overview)
