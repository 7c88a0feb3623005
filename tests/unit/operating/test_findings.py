"""Findings, and the names in them."""

from __future__ import annotations

from celery_dislock.operating.findings import LISTED, number, some, warning


def test_a_few_names_are_all_given():
    """Each once, in order; of many names the first are given, and how many others there are."""
    assert some(["b", "a", "b"]) == "a, b"
    assert some(f"k{number}" for number in range(9)) == "k0, k1, k2, k3, k4 and 4 others"


def test_a_finding_carries_a_bounded_number_of_names():
    """Ten thousand leases of a dead worker are one finding."""
    assert len(warning("", "", map(str, range(10_000))).about) == LISTED


def test_numbers_are_read_as_people_write_them():
    """One lease, two processes."""
    assert (number(1, "lease"), number(0, "lease")) == ("1 lease", "0 leases")
    assert (number(1, "process"), number(2, "process")) == ("1 process", "2 processes")
