"""Findings, and the names in them."""

from __future__ import annotations

from celery_dislock.operating.findings import LISTED, listed, number, some


def test_a_few_names_are_all_given():
    """Each once, in order."""
    assert some(["b", "a", "b"]) == "a, b"


def test_of_many_names_the_first_are_given():
    """And how many others there are."""
    assert some(f"k{number}" for number in range(9)) == "k0, k1, k2, k3, k4 and 4 others"


def test_a_finding_carries_a_bounded_number_of_names():
    """Ten thousand leases of a dead worker are one finding."""
    assert len(listed(str(number) for number in range(10_000))) == LISTED


def test_numbers_are_read_as_people_write_them():
    """One lease, two processes."""
    assert (number(1, "lease"), number(0, "lease")) == ("1 lease", "0 leases")
    assert (number(1, "process"), number(2, "process")) == ("1 process", "2 processes")
