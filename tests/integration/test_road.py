"""How much of the package each journey passes, from a task to its socket."""

from __future__ import annotations

from benchmarks.road import GOALS, measure


def test_no_journey_is_longer_than_its_goal(redis_url):
    """A change that makes one longer must be seen; `make road ARGS=-v` names the modules."""
    found = measure(redis_url)
    assert found.keys() == GOALS.keys()
    longer = {
        name: (passed.modules, passed.functions)
        for name, passed in found.items()
        if len(passed.modules) > GOALS[name][0] or passed.functions > GOALS[name][1]
    }
    assert not longer
