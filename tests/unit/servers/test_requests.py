"""What is asked, as the scripts take it."""

from __future__ import annotations

import pytest

from celery_dislock.servers.requests import ALONE, Terms


@pytest.mark.parametrize(
    ("terms", "written"),
    [(ALONE, ("x", 1)), (Terms("shared"), ("s", 1)), (Terms(limit=[2, 3, 4]), ("x", "3,4"))],
)
def test_of_several_limits_those_of_the_locks_that_are_asked_for_are_sent(terms, written):
    """One number holds for all locks."""
    assert terms.written(1, 3) == written
