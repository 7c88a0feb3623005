"""Uniqueness when sending, in random histories; proof/simulated_sending.py says what must be so.

They are on the scripts in this process; ``test_conformance`` has some on servers.
"""

import random
from collections import Counter

import pytest

from proof.simulated_sending import RECORD, History
from tests.integration.driven_clock import DrivenServer
from tests.integration.lua_server import LuaServer

STEPS = 150  # of a history


class LuaWorld(LuaServer):
    def record(self):
        return self.send("GET", RECORD)


class RedisWorld(DrivenServer):
    def record(self):
        return self.raw.get(RECORD)


def run(world, seeds, *, loses=False):
    """Run histories; return how often what was seen."""
    seen = Counter()
    for seed in seeds:
        history = History(world, seed, loses=loses)
        try:
            seen += history.go(STEPS)
        except Exception as exc:
            exc.args = (f"seed {seed!r}, loses={loses}: {exc}",)
            raise
        seen["commands"] += history.commands
    return seen


@pytest.mark.parametrize("loses", [False, True], ids=["state is kept", "state is lost"])
def test_histories(loses):
    """Tens of thousands of steps: what is sent twice, late or lost, and who is killed."""
    seen = run(LuaWorld(), range(250), loses=loses)
    often = "replaced,sooner,duplicate,late,killed,hours,an id again,retried,redelivered,revoked"
    for what in (*often.split(","), "later", "ran without locks"):
        assert seen[what] > 50, f"{what} has hardly been seen: {seen}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("loses", [False, True], ids=["state is kept", "state is lost"])
def test_many_more_histories(loses):
    """Millions of steps, other ones each time; the seed is told if one fails."""
    first = random.randrange(2**32)
    run(LuaWorld(), (f"{first}:{nth}" for nth in range(20_000)), loses=loses)
