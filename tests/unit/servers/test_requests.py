"""What is asked, as the scripts take it."""

from __future__ import annotations

import pytest

from celery_dislock.scripts import RELEASE, RELEASE_UNIQUE
from celery_dislock.servers.requests import ALONE, Ending, Terms
from celery_dislock.servers.reservations import Reservation


@pytest.mark.parametrize(
    ("terms", "written"),
    [(ALONE, ("x", 1)), (Terms("shared"), ("s", 1)), (Terms(limit=[2, 3, 4]), ("x", "3,4"))],
)
def test_of_several_limits_those_of_the_locks_that_are_asked_for_are_sent(terms, written):
    """One number holds for all locks."""
    assert terms.written(1, 3) == written


def test_an_ending_chooses_its_script():
    """Only a reservation that ends, too, needs the longer one."""
    assert Ending(at_least=1.0001, ticket="t", settles=2).call("home") == (
        RELEASE,
        (1001, "home", "t", 2000),
    )
    script, arguments = Ending(reservation=Reservation("l", "1", mark="m", number=7)).call("")
    assert (script, arguments) == (RELEASE_UNIQUE, (0, "", "", 0, "1", "m", 7, "end"))
