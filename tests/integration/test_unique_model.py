"""Uniqueness when sending, in random histories; proof/simulated_sending.py says what must be so.

They are on the scripts in this process; ``test_conformance`` has some on servers.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from celery_dislock.servers.replies import Replaced
from celery_dislock.servers.requests import Ending
from celery_dislock.servers.reservations import Reservation, Reserved
from proof.simulated_sending import LOCK, PUBLISH_FOR, RECORD, RECORD_MOST, History
from tests.integration.driven_clock import DrivenServer
from tests.integration.lua_server import LuaServer

STEPS = 150  # of a history
EDITIONS = 2000
HOUR = 3600.0  # seconds


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
    often = "replaced,duplicate,late,killed,hours,an id again,retried,redelivered,revoked"
    for what in (*often.split(","), "ran without locks"):
        assert seen[what] > 50, f"{what} has hardly been seen: {seen}"


@pytest.mark.slow
@pytest.mark.parametrize("loses", [False, True], ids=["state is kept", "state is lost"])
def test_many_more_histories(loses):
    """Millions of steps, other ones each time; the seed is told if one fails."""
    first = random.randrange(2**32)
    run(LuaWorld(), (f"{first}:{nth}" for nth in range(20_000)), loses=loses)


def test_thousands_of_editions():
    """None but the newest runs, in whatever order they come; the state is one small record."""
    world, rng = LuaWorld(), random.Random(1)
    store = world.store()
    messages = []
    for nth in range(EDITIONS):
        wanted = Reservation(LOCK, f"t{nth}", "end", PUBLISH_FOR)
        found = store.reservations.reserve(wanted, f"n{nth}", replaces=True)
        assert isinstance(found, Reserved)
        messages.append(wanted._replace(ttl=HOUR, mark=found.mark, number=found.number))
        store.reservations.confirm(messages[-1])
    newest = messages[-1]
    rng.shuffle(messages)
    ran, told = [], set()
    for nth, message in enumerate([*messages, *messages]):  # each comes twice
        try:
            store.acquire([LOCK], f"{message.id}@w:1/{nth}", 30.0, "{}", reservation=message)
        except Replaced as replaced:
            told.add(replaced.by)
            continue
        ran.append(message)
        store.release([LOCK], f"{message.id}@w:1/{nth}", Ending(reservation=message))
        assert set(world.ttls()) == {RECORD}
        assert len(world.record()) < RECORD_MOST
    assert (ran, told) == ([newest, newest], {newest.id})


@pytest.mark.parametrize("left", [0.002, 0.001, 0.0005, 0.0])
def test_the_last_moment_of_another_reservation(left):
    """A task whose key another message has begins, and its lock is not granted by half."""
    world = LuaWorld()
    store = world.store()
    mine = Reservation(LOCK, "a", "end", 60.0)
    found = store.reservations.reserve(mine._replace(ttl=1.0), "n1", replaces=True)
    mine = mine._replace(mark=found.mark, number=found.number)
    store.reservations.reserve(Reservation(LOCK, "b", "end", 1.0), "n2", replaces=True)
    world.advance(1.0 - left)
    assert store.acquire([LOCK], "a@w:1/1", 30.0, "{}", reservation=mine).tokens
    assert store.release([LOCK], "a@w:1/1", Ending(reservation=mine))
    assert all(ttl > 0 for ttl in world.ttls().values())
