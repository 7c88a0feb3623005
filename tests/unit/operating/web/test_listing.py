"""The list of locks: searched, sorted and cut; and a lock as JSON."""

from __future__ import annotations

import pytest

from celery_dislock.exceptions import DamagedLockError, StoreError
from celery_dislock.operating.site import Site
from celery_dislock.operating.web import listing
from celery_dislock.operating.web.listing import as_json, find
from tests.pages import RESERVED, FakeOverview, holder, lock


@pytest.fixture
def overview():
    fake = FakeOverview()
    fake.put(
        lock("b", holders=[holder(2)], waiting=1),
        lock("a", holders=[holder(1, worker="celery@W2"), holder(3)]),
        lock("c", limit=0, aside=2),
        lock("d", reservation=RESERVED),
        lock("gone"),
    )
    fake.known["dislock:{e}"] = DamagedLockError("redis://fake", "wrong type", "dislock:{e}")
    return fake


@pytest.fixture
def found(overview):
    """Search the list, and return the keys in a word."""

    def find_keys(search="", shown="all", order="key"):
        rows = listing.listing(Site(overview, "dislock")).rows
        return "".join(row.key for row in find(rows, search, shown, order))

    return find_keys


@pytest.mark.parametrize(
    ("search", "keys"),
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
def test_a_search_looks_into_key_task_id_and_worker(found, search, keys):
    """All words must be there, in any case; a lock that has ended is not listed."""
    assert found(search) == keys


@pytest.mark.parametrize(
    ("shown", "keys"),
    [
        ("held", "abf"),
        ("line", "b"),
        ("limited", "c"),
        ("reserved", "d"),
        ("trouble", "cef"),
        ("paused", "c"),
        ("damaged", "e"),
        ("overdue", "f"),
    ],
)
def test_a_kind_of_locks_can_be_chosen_and_is_counted(overview, found, shown, keys):
    """What is held, what waits, what an operator has changed, what is wrong."""
    overview.put(lock("f", holders=[holder(4, renewed=25.0, remaining=5.0), holder(5)]))
    assert found(shown=shown) == keys
    assert listing.listing(Site(overview, "dislock")).totals.get(shown, len(keys)) == len(keys)


@pytest.mark.parametrize(
    ("order", "keys"),
    [("key", "abcde"), ("held", "abcde"), ("waiting", "bacde"), ("trouble", "ecabd")],
)
def test_each_lock_has_its_place_in_each_order(found, order, keys):
    """What is equal in it comes by key, so pages neither skip nor repeat a lock."""
    assert found(order=order) == keys


def test_there_is_a_limit(overview, monkeypatch):
    """The list says that there are more."""
    overview.put(*(lock(f"x{number}", holders=[holder()]) for number in range(300)))
    assert not listing.listing(Site(overview, "dislock")).is_cut
    monkeypatch.setattr(listing, "LOCKS_MOST", 150)
    known = listing.listing(Site(overview, "dislock"))
    assert known.is_cut
    assert len(known.rows) == 150


def test_a_server_that_does_not_answer_is_no_damaged_lock(overview):
    """Half a list would look whole."""
    overview.known["dislock:{e}"] = StoreError("redis://fake", "no answer in time")
    with pytest.raises(StoreError):
        listing.listing(Site(overview, "dislock"))


def test_a_lock_with_many_leases_is_cut():
    """The browser gets the oldest and their number; JavaScript's numbers have 53 bits."""
    told = as_json(lock(holders=[holder(number, token=2**60 + 1) for number in range(5)]), most=2)
    assert [one["id"] for one in told["holders"]] == ["id-4", "id-3"]
    assert (told["held_by"], told["holders"][0]["token"]) == (5, "1152921504606846977")
