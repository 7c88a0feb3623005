from __future__ import annotations

import pytest

from tests.faults.history import Interval, Journal, read, violations

pytestmark = pytest.mark.faults


def lease(token, begin, end, key="k", holder=None):
    return Interval(key, token, holder or f"p{token}", begin, end)


def test_one_after_another_is_well():
    """Leases that follow each other, and leases of different locks at once, break nothing."""
    assert violations([]) == []
    assert violations([lease(2, 2.1, 3), lease(1, 1, 2), lease(1, 1, 5, key="other")]) == []


@pytest.mark.parametrize(
    ("begin", "end"), [(1.9, 3), (1.1, 1.2), (2, 3), (1, 1)], ids=["ends", "in", "touch", "begins"]
)
def test_two_at_once_are_found(begin, end):
    """Any shared instant counts: at the end, in the middle, or a single one."""
    (sentence,) = violations([lease(1, 1, 2), lease(2, begin, end)])
    assert "p1" in sentence
    assert "p2" in sentence


def test_an_overlap_behind_a_short_lease_is_found():
    """A long lease overlaps every later one, not only the next."""
    assert len(violations([lease(1, 1, 9), lease(2, 2, 3), lease(3, 4, 5)])) == 2


@pytest.mark.parametrize("token", [1, 5])
def test_a_token_that_does_not_grow_is_found(token):
    """A later lease with the same or a lower token breaks the fence."""
    (sentence,) = violations([lease(5, 1, 2, holder="a"), lease(token, 3, 4, holder="b")])
    assert "token" in sentence


def test_a_journal_is_read_as_intervals(tmp_path):
    """The lines of one lease make one interval, from the first instant to the last."""
    journal = Journal(tmp_path / "journal")
    for key, token, holder, at in [
        ("k", 2, "b", 4.0),
        ("k", 1, "a", 2.0),
        ("k", 1, "a", 3.0),
        ("k", 1, "a", 1.0),
    ]:
        journal.trusted(key, token, holder, at)
    journal.close()
    assert read(tmp_path / "journal") == [
        lease(1, 1.0, 3.0, holder="a"),
        lease(2, 4.0, 4.0, holder="b"),
    ]
