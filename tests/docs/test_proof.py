"""The page of the proof says what the results say."""

import pytest

from proof.controls import CONTROLS
from proof.page import FENCED, PARTS, PROMISES, render

COUNTS = {"holds": 1000, "tasks": 7, "faults: kill a process": 2}
RUN = {"what": "run", "date": "2026-11-01", "machine": "m", "with": "v", "server": "redis"}


def run(seed, broken=None, **counts):
    """Make the result of a run."""
    counts = {**COUNTS, **counts}
    return {**RUN, "seed": seed, "minutes": 2.0, "counts": counts, "broken": broken or {}}


def test_runs_are_summed():
    """Runs of a kind of server are one row, with all of their seeds."""
    assert "| one Redis | 1, 2 | 4 | 2,000 | 14 | 4 | nothing |" in render([run(1), run(2)])


@pytest.mark.parametrize(
    ("result", "verdict"),
    [
        (run(1), "**holds**: one Redis"),
        (run(1, {"token": 3}), "**does not hold**: one Redis"),
        (run(1, **{"overlaps after the server forgot": 1}), f"**{FENCED}**: one Redis"),
    ],
)
def test_a_promise_has_a_verdict(result, verdict):
    """It is the first of them here, which is quoted."""
    page = render([result])
    assert page.index("> **At most one live lease") < page.index(verdict) < page.index("> **No exp")


def test_every_part_that_is_judged_is_of_a_promise():
    """The page leaves out none of what the checker and the controls are about."""
    judged = {part for parts in PROMISES.values() for part in parts}
    assert judged == set(PARTS)
    assert {control[1] for control in CONTROLS.values()} <= judged
