"""The phases of a delivery's own reservation."""

import pytest

from celery_dislock.servers.reservations import OwnReservation, Reservation

NOTHING = ()
ENDS = ("end",)


@pytest.mark.parametrize("until", ["start", "end", "expiry"])
@pytest.mark.parametrize(
    ("steps", "told", "renewed"),
    [
        (["end", "end"], {"start": ENDS, "end": ENDS, "expiry": ENDS}, ""),
        (["begun"], {}, "end"),
        (["begun", "end"], {"end": ENDS, "expiry": ENDS}, ""),
        (["keep", "end"], {}, ""),
        (["begun", "keep", "begun", "end"], {}, ""),
        (["end", "keep", "begun", "end"], {"start": ENDS, "end": ENDS, "expiry": ENDS}, ""),
        (["own", "end"], {}, ""),
        (["other"], {"start": ENDS, "end": ENDS, "expiry": ENDS}, ""),
        (["begun", "other", "end"], {"end": ENDS, "expiry": ENDS}, ""),
    ],
    ids=str,
)
def test_it_is_ended_once_and_by_one(until, steps, told, renewed):
    """What was handed on, or has ended with its begin, is left alone; the lease renews "end"."""
    calls = []
    own = OwnReservation(Reservation("own", "1", until), lambda what, _: calls.append(what))
    for step in steps:
        if step in {"own", "other"}:
            own.hand_on(step)
        else:
            getattr(own, step)()
    assert tuple(calls) == told.get(until, NOTHING)
    assert bool(own.renewed) is (until == renewed)
