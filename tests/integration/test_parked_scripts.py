"""Parked tasks on the scripts in this process, where a step costs microseconds and time is driven.

What is told here are races and damage between two scripts; test_lines.py tells the rest.
"""

from __future__ import annotations

import pytest
from lupa.lua51 import LuaError

from celery_dislock.parking.store import ANYBODY, ENDED, Bounds
from celery_dislock.servers.replies import Done, Granted, Parked, Refused
from celery_dislock.servers.requests import Ending
from tests.holding import name_of
from tests.integration.lua_server import LuaServer
from tests.integration.parked import LOCK, LONG, TURN, Broker

OTHER = name_of("other")


@pytest.fixture
def server():
    return LuaServer()


@pytest.fixture
def broker(server):
    return Broker(server)


@pytest.fixture
def held(broker):
    """The lock is held by the task "first"."""
    assert isinstance(broker.ask("first"), Granted)


class TestWhoHasLeftItsLineUnrun:
    """A delivery has taken a task out of its line, where the task has other locks or none."""

    @pytest.fixture
    def left(self, broker, held):
        """The task "a" had its turn, and was put off by a worker that takes other locks for it."""
        broker.park("a")
        broker.end("first")
        assert broker.lines.withdraw(LOCK, "a:0:0", "that one") is True

    def test_what_goes_on_with_it_runs(self, broker, left):
        """Where the task has its old lock, the message that was put off is no copy of a turn."""
        assert isinstance(broker.ask("a", goes_on="that one"), Granted)

    def test_what_goes_on_with_it_is_parked_again_and_runs_once(self, broker, left):
        """It has its turn as any other, and only then a copy finds the mark of what has ended."""
        broker.ask("b")
        assert isinstance(broker.park("a", goes_on="that one"), Parked)
        broker.end("b")
        assert broker.given() == ["a", "a"]
        assert isinstance(broker.ask("a", copy=2, marked=True), Granted)
        broker.end("a", copy=2)
        for goes_on in ("", "that one", ANYBODY):
            assert broker.ask("a", copy=3, marked=True, goes_on=goes_on) == Done()

    def test_a_copy_of_its_turn_does_not_run(self, broker, left):
        """Nor does the first message if it is delivered again: another one carries the work on."""
        assert broker.ask("a", marked=True) == Done()
        assert broker.ask("a") == Done()
        assert broker.ask("a", goes_on="another") == Done()

    def test_its_turn_runs_if_it_is_delivered_again(self, broker, left):
        """The worker that took it out has died: the broker says so, perhaps under a new name."""
        assert isinstance(broker.ask("a", marked=True, goes_on=ANYBODY), Granted)

    def test_it_moves_on_to_a_third_lock(self, broker, left):
        """Its key was changed twice: only a copy is held to be done."""
        assert broker.lines.move_out(LOCK, "a:0:0") is True
        for goes_on in ("that one", ANYBODY):
            assert broker.lines.move_out(LOCK, "a:0:0", goes_on) is False

    def test_a_message_that_nobody_can_read_is_set_aside_all_the_same(self, broker, left):
        """It was parked again: the mark of its former life does not keep it at the head."""
        broker.ask("b")
        broker.park("a", goes_on="that one")
        broker.park("c")
        broker.end("b")
        assert broker.given() == ["a", "a"]
        assert [turn.ticket for turn in broker.lines.set_aside(LOCK, "a:0:0", b"?")] == ["c:0:0"]

    def test_what_has_ended_itself_leaves_no_mark(self, broker, held):
        """Its before_start may have sent it again, or somebody a dead-letter queue."""
        broker.park("a")
        broker.park("b")
        broker.end("first")
        assert broker.lines.withdraw(LOCK, "a:0:0", ENDED) is True
        assert broker.given() == ["a", "b"]
        assert broker.lines.withdraw(LOCK, "a:0:0", ENDED) is False
        broker.ask("b", copy=2, marked=True)
        broker.end("b", copy=2)
        assert isinstance(broker.ask("a", copy=2, marked=True), Granted)


class TestIndex:
    """The index of the lines that a sweep visits."""

    def listed(self, broker):
        _, _, found = broker.lines.page(b"0", 100)
        return found

    def test_a_line_into_which_somebody_is_about_to_park_is_not_struck_off(self, broker, held):
        """It is listed, found empty and struck off, all of that just before it has a task."""
        broker.lines.enlist(LOCK)
        found = self.listed(broker)
        assert broker.lines.sweep(list(found))[LOCK].parked == 0
        broker.lines.delist(LOCK, found[LOCK])
        broker.park("a")
        assert LOCK in self.listed(broker)

    def test_an_empty_line_is_struck_off_later(self, broker, server):
        """After a minute nobody is about to park."""
        broker.lines.enlist(LOCK)
        server.advance(60)
        broker.lines.delist(LOCK, self.listed(broker)[LOCK])
        assert self.listed(broker) == {}

    def test_no_number_comes_again(self, broker, server):
        """Who read one before the line was struck off strikes nothing off afterwards."""
        numbers = []
        for _ in range(2):
            broker.lines.enlist(LOCK)
            numbers.append(self.listed(broker)[LOCK])
            server.advance(60)
            broker.lines.delist(LOCK, numbers[0])
        assert int(numbers[0]) < int(numbers[1])
        assert self.listed(broker) == {LOCK: numbers[1]}
        server.advance(-3600)  # as a failover may set the clock
        broker.lines.enlist(LOCK)
        assert int(self.listed(broker)[LOCK]) > int(numbers[1])


def sent(at):
    return b'1 {"a":0,"headers":{"dislock":{"v":1,"sent":%d}}}' % at


class TestMakingRoom:
    REPLACES = Bounds(1, overflow="replace")

    def test_one_that_is_replaced_at_once_is_told_the_same_when_sent_again(self, broker, held):
        """Its end is to be told: it has not run."""
        broker.park("a", message=sent(2), bounds=self.REPLACES)
        for _ in range(2):
            answer = broker.park("b", message=sent(1), bounds=self.REPLACES)
            assert isinstance(answer, Parked)
            assert answer.replaced == {"b:0:0": sent(1)}
        assert broker.lines.leave(LOCK, "b:0:0") is True
        assert broker.park("b", message=sent(1), bounds=self.REPLACES) == Done()

    def test_a_long_line_makes_room_in_parts(self, broker, held, server):
        """No script runs for long: a line beyond its limit is shortened by each that comes."""
        for number in range(250):
            broker.park(f"t{number}")
        for nth, left in enumerate((151, 52, 1, 1)):
            broker.park(f"new{nth}", bounds=self.REPLACES)
            assert server.send("ZCARD", f"{LOCK}:line") == left
        assert server.send("HLEN", f"{LOCK}:replaced") == 253

    def test_nobody_goes_for_one_that_finds_no_room_all_the_same(self, broker, held, server):
        """More small ones than one script takes out do not make room for a big one."""
        for number in range(150):
            broker.park(f"t{number}", message=b"x" * 100)
        bounds = Bounds(0, 30_000, "replace")
        assert type(broker.park("big", message=b"x" * 29_000, bounds=bounds)).__name__ == "Full"
        assert server.send("ZCARD", f"{LOCK}:line") == 150
        assert isinstance(broker.park("new", message=b"x" * 10_000, bounds=bounds), Parked)
        assert int(server.send("HGET", f"{LOCK}:tickets", "bytes")) <= 30_000


def test_a_reply_brings_a_bounded_number_of_replaced_tasks(broker, held):
    """While their ends cannot be told they become many, and may be large; none is left for ever."""
    one = Bounds(most=1, overflow="replace")
    for number in range(150):
        parked = broker.park(f"t{number}", bounds=one)
        assert len(parked.replaced) <= 100
    swept = broker.lines.sweep([LOCK])[LOCK]
    assert len(swept.replaced) == 100
    told = set()
    while len(told) < 149:
        for ticket in broker.lines.sweep([LOCK])[LOCK].replaced:
            broker.lines.leave(LOCK, ticket)
            told.add(ticket)
    broker.park("large", bounds=one, message=b"x" * 200_000)
    broker.park("larger", bounds=one, message=b"y" * 200_000)
    replaced = broker.park("last", bounds=one).replaced
    assert sum(map(len, replaced.values())) < 300_000


def test_a_copy_that_claims_again_lets_others_in(broker, server):
    """Its process has died and held several of a limit: those in line do not wait for a sweep."""
    for task in ("a", "b"):
        broker.ask(task, ttl=60, limit=2)
    for task in ("c", "d", "e"):
        broker.park(task, limit=2)
    for task in ("a", "b"):
        broker.end(task)
    assert broker.given() == ["c", "d"]
    for task in ("c", "d"):
        broker.ask(task, copy=2, marked=True, ttl=60, limit=2)
    server.advance(61)
    assert isinstance(broker.ask("c", copy=3, marked=True, ttl=60, limit=2), Granted)
    assert broker.given() == ["e"]


@pytest.mark.parametrize("waits", [0.0, 60.0])
def test_a_newcomer_does_not_pass_one_whose_turn_has_run_out(broker, held, server, waits):
    """Nobody has swept yet: the lock is free, and the parked task is first in line all the same."""
    broker.park("a")
    broker.end("first")
    server.advance(TURN + 1)
    answer = broker.store.acquire([LOCK], "new@w:1/1", TURN, "{}", place=waits)
    assert isinstance(answer, Refused)
    assert broker.lines.sweep([LOCK])[LOCK].parked == 1
    assert broker.given() == ["a", "a"]


def test_claims_and_releases_do_not_read_all_claims(broker, server):
    """What one of many that run costs does not grow with their number."""
    many = 30
    broker.ask("first", mode="shared")
    for number in range(many):
        broker.park(f"t{number}", ttl=LONG, limit=1000)
    broker.end("first")
    turns = 0
    while given := broker.given():
        turns += len(given)
        for task in given:
            broker.ask(task, copy=2, marked=True, limit=1000)
    assert turns == many
    assert server.send("HLEN", f"{LOCK}:running") == many
    broker.end("t0", copy=2)
    assert f"HGETALL {LOCK}:running" not in server.called()
    broker.ask("t1", copy=3, marked=True, limit=1000)
    assert f"HGETALL {LOCK}:running" not in server.called()
    broker.store.release([LOCK], "t2@w:1/2", Ending(ticket="t2:0:0", settles=5))
    assert f"HGETALL {LOCK}:running" not in server.called()


DAMAGE = {
    "a lease": ("HSET", LOCK, "x", "?"),
    "the limit": ("SET", f"{LOCK}:limit", "?", "PX", "1000000"),
    "the count of bytes": ("HSET", f"{LOCK}:tickets", "bytes", "?"),
    **{
        end: ("SET", f"{LOCK}:{end}", "?", "PX", "1000000")
        for end in ("line", "places", "tickets", "handed", "running", "replaced", "aside")
    },
}
CALLS = {
    "park": lambda broker: broker.park("new"),
    "claim": lambda broker: broker.ask("a", copy=2, marked=True),
    "leave": lambda broker: broker.lines.leave(LOCK, "b:0:0"),
    "withdraw": lambda broker: broker.lines.withdraw(LOCK, "b:0:0"),
    "withdraw and go on": lambda broker: broker.lines.withdraw(LOCK, "b:0:0", "me"),
    "drop": lambda broker: broker.lines.drop(LOCK, "b:0:0", '"why":""'),
    "limit": lambda broker: broker.lines.limit(LOCK, 5, ttl=60),
    "free": lambda broker: broker.store.free(LOCK, "ran@w:1/1", broker.token),
    "give back": lambda broker: broker.lines.give_back(LOCK, "a:0:0"),
    "sweep": lambda broker: broker.lines.sweep([LOCK]),
    "release_dead": lambda broker: broker.store.release_dead([OTHER, LOCK], "ran@w:1/", 0),
    "wait": lambda broker: broker.store.acquire([LOCK], "w@w:1/1", TURN, "{}", place=60),
    "wait for several": lambda broker: broker.store.acquire(
        [OTHER, LOCK], "w@w:1/1", TURN, "{}", place=60
    ),
}


def is_of_no_concern(damage, call):
    """A limit takes a damaged one's place, and who waits in its slot reads no parked tasks."""
    parked = {"the count of bytes", "tickets", "running", "replaced", "aside"}
    return (call, damage) == ("limit", "the limit") or (
        call.startswith("wait") and damage in parked
    )


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("damage", DAMAGE)
def test_what_meets_damage_has_changed_nothing(server, damage, call):
    """An error that comes after half of the work would leave the other half undone for ever."""
    broker = Broker(server)
    broker.ask("first", limit=2)
    broker.ask("ran", limit=2)
    for task in "abc":
        broker.park(task, limit=2)
    broker.end("first")
    assert broker.given() == ["a"]
    broker.token = next(one.token for one in broker.store.holders(LOCK) if one.owner[0] == "r")
    key = DAMAGE[damage][1]
    if DAMAGE[damage][0] == "SET" and damage != "the limit":
        server.send("DEL", key)
    server.send(*DAMAGE[damage])
    before = server.contents()
    if is_of_no_concern(damage, call):
        CALLS[call](broker)
        return
    with pytest.raises(LuaError):
        CALLS[call](broker)
    assert server.contents() == before
