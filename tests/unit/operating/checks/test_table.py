"""Rows of checks, findings, and the names in them."""

from __future__ import annotations

from celery_dislock.exceptions import StoreError
from celery_dislock.operating.checks.table import (
    LISTED,
    Row,
    findings,
    number,
    some,
    warning,
)
from tests.unit.operating.checks.examples import facts


def test_a_check_that_cannot_go_on_says_so_and_ends_no_other():
    """Its findings have its name; an answer that nobody expects ends no examination either."""
    for error in (StoreError("redis://h", "no answer in time"), KeyError("version")):

        def lines(_, error=error):
            yield warning("A line.")
            raise error

        first, last = findings("lines", lines, facts())
        assert (first.check, first.level, first.what) == ("lines", "warning", "A line.")
        assert (last.check, last.level) == ("lines", "note")
        assert "could not be looked at" in last.what


def test_a_row_names_what_it_is_about():
    """With what it says of each, unless it says no more than that it is so."""
    row = Row("sizes", warning, lambda size, _: size > 9 or (size > 5 and "large"), "Big", "Cut.")
    [one] = row.finds({"a": 1, "b": 7, "c": 10}, facts())
    assert one == ("sizes", "warning", "Big: b (large), c.", "Cut.", ["b", "c"])
    assert list(row.finds({"a": 1}, facts())) == []


def test_names_and_numbers_are_few():
    """Each once, in order; the first of many, and how many others there are."""
    assert some(["b", "a", "b"]) == "a, b"
    assert some(f"k{number}" for number in range(9)) == "k0, k1, k2, k3, k4 and 4 others"
    assert len(warning("", "", map(str, range(10_000))).about) == LISTED
    assert (number(1, "lease"), number(0, "lease")) == ("1 lease", "0 leases")
