"""Parked tasks: how they join a line, have their turn, leave it, and are found.

The scripts run in this process, where a turn runs out when a test says so; damage, memory and a
cluster's slots are a real server's.  test_parked_model.py tells the rules of joining and turns.
"""

from __future__ import annotations

import hashlib
import json
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from redis.crc import key_slot

from celery_dislock import scripts
from celery_dislock.exceptions import DamagedLockError
from celery_dislock.keys.names import execution_start, owners_start, shown_id, ticket_name
from celery_dislock.messages.message import Message
from celery_dislock.parking.identity import StoreIdentity
from celery_dislock.parking.store import ENDED, Bounds, Ticket
from celery_dislock.scripts import Script
from celery_dislock.servers.records import in_words
from celery_dislock.servers.replies import Done, Full, Granted, Parked, Refused, Swept, Turn
from celery_dislock.servers.requests import Ending, Terms
from celery_dislock.servers.store import Store
from tests.conftest import BOTH
from tests.holding import name_of
from tests.integration.lua_server import LuaServer
from tests.integration.parked import LOCK, LONG, TURN, Broker, message_of, owner_of
from tests.integration.servers import RedisCluster
from tests.integration.strange import FAR

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

INDEX = "dislock:lines:here"
LAST_TURN = 300  # seconds
HOUR = 3600
SHARED = {"mode": "shared"}


def real(url):
    return SimpleNamespace(store=partial(Store, url))


def stored(task, name):
    """Make the bytes of a message whose headers name a task."""
    headers = {"id": task, "argsrepr": '{"task":"shop.spy"}'} | ({"task": name} if name else {})
    return Message("", "celery", headers, None, None, {}, True, b"body").to_bytes()


def turn_of(task):
    return Turn(LOCK, f"{task}:0:0", message_of(task))


@pytest.fixture
def server():
    return LuaServer()


@pytest.fixture
def client(server):
    return server.client(decode_responses=True)


@pytest.fixture
def driven(server):
    """Time that passes when it is told to, for the scripts and the keys."""

    def pass_time(seconds):
        server.advance(seconds)
        server.end_keys()

    return pass_time


@pytest.fixture
def broker(server) -> Iterator[Broker]:
    """A broker; what a test leaves behind ends by itself, and its bytes are counted right."""
    yield Broker(server)
    assert all(ttl > 0 for ttl in server.ttls().values()), server.ttls()
    records = server.client().hgetall(f"{LOCK}:tickets")
    counted = records.pop(b"bytes", None)
    assert int(counted or 0) == sum(map(len, records.values()))
    assert (counted is None) == (not records)


@pytest.fixture
def held(broker):
    """The lock is held by the task "first"."""
    assert isinstance(broker.ask("first"), Granted)


def line(client):
    """Return the tasks in line, in their order, and the owners that wait."""
    members = client.zrange(f"{LOCK}:line", 0, -1)
    return [m.partition(":")[0] if m.endswith("#") else m for m in members]


def snapshot(server):
    """Return all that is there, and about when it ends."""
    return server.contents(), {name: round(ttl / 60_000) for name, ttl in server.ttls().items()}


def left(client):
    """Return what is there but marks of work that is done."""
    return {key for key in client.keys("*") if f"{LOCK}:done:" not in key}


class TestJoining:
    def test_who_only_asks_learns_its_place_and_leaves_no_trace(self, broker, held, client, server):
        """A refusal tells the holder and the place in line; nothing is parked by it."""
        before = snapshot(server)
        answer = broker.ask("a")
        assert answer == Refused(owner_of("first"), LONG, {"id": "first"}, place=1)
        assert snapshot(server) == before
        broker.park("a")
        assert broker.ask("b").place == 2


class TestTurns:
    def test_each_turn_is_twice_as_long_and_none_longer_than_five_minutes(
        self, broker, held, driven
    ):
        """A slow broker gets the more time the oftener it was too slow, within bounds."""
        broker.park("a")
        broker.end("first")
        lasted = []
        for _ in range(10):
            (reserved,) = broker.store.holders(LOCK)
            lasted.append(round(reserved.remaining))
            driven(lasted[-1] - 1)
            broker.given()
            broker.sweep()
            assert broker.given() == []
            driven(1)
            broker.sweep()
            assert broker.given() == ["a"]
        assert lasted == [5, 10, 20, 40, 80, 160, *[LAST_TURN] * 4]

    def test_a_copy_of_what_runs_is_refused_by_its_holder(self, broker, held):
        """Marked or not, with a message or without: it is told who runs, and has no place."""
        broker.park("a")
        broker.end("first")
        broker.ask("a", copy=2, marked=True)
        running = Refused(owner_of("a", 2), LONG, {"id": "a"}, place=0)
        for marked in (True, False):
            assert broker.ask("a", copy=3, marked=marked) == running
            assert broker.park("a", copy=3, marked=marked) == running

    def test_an_unmarked_copy_claims_no_turn(self, broker, held):
        """It is acknowledged; the message that comes with the turn claims it."""
        broker.park("a")
        broker.end("first")
        assert isinstance(broker.ask("a", copy=2), Parked)
        assert isinstance(broker.ask("a", copy=3, marked=True), Granted)

    def test_a_request_that_comes_late_parks_no_task_that_has_run(self, broker, held):
        """The one that was sent in its place was granted the lock, which became free meanwhile."""
        broker.ask("a")
        broker.end("first")
        assert isinstance(broker.park("a"), Granted)
        broker.end("a")
        broker.ask("other")
        assert broker.park("a") == Done()

    @pytest.mark.parametrize("others", ["others wait", "the lock is free"])
    def test_a_request_that_comes_late_parks_no_task_that_found_the_line_full(
        self, others, broker, held, client
    ):
        """Its caller was told that it is skipped; another delivery of it may be parked."""
        room = {"bounds": Bounds(1)}
        broker.park("a", **room)
        assert isinstance(broker.park("late", **room), Full)
        broker.end("first")
        if others == "the lock is free":
            broker.ask("a", copy=2, marked=True)
            broker.end("a", copy=2)
        assert isinstance(broker.park("late", **room), Full)
        assert "late" not in [*line(client), *broker.given()]
        assert "late:0:0" not in client.hkeys(f"{LOCK}:running")
        assert isinstance(broker.park("late", copy=2, **room), (Parked, Granted))

    def test_a_parked_task_of_which_nothing_is_known_runs_once(self, broker, client):
        """Its record was lost, in a failover say: it is not done, and from then on it is known."""
        answer = broker.ask("a", marked=True)
        assert isinstance(answer, Granted)
        assert answer.claimed
        assert isinstance(broker.ask("a", copy=2, marked=True), Refused)
        assert broker.end("a") is True
        assert broker.ask("a", copy=2, marked=True) == Done()
        assert not left(client)

    def test_a_task_that_ends_late_takes_its_copys_turn_away(self, broker, driven):
        """It ran without a ticket, and lost its lease: what was parked meanwhile is done, too."""
        broker.ask("a", ttl=1)
        driven(1)
        broker.ask("first")
        broker.park("a", copy=2)
        broker.end("first")
        assert broker.given() == ["a"]
        broker.end("a")
        assert broker.ask("a", copy=3, marked=True) == Done()

    def test_a_turn_that_is_given_back_is_the_next_sweeps_to_give(
        self, broker, held, driven, client
    ):
        """Its message could not be published: it has its place again, and turns as long as ever."""
        broker.park("a")
        broker.park("b")
        broker.end("first")
        driven(TURN)
        broker.sweep()  # its second turn
        assert broker.given() == ["a", "a"]
        broker.lines.give_back(LOCK, "a:0:0")
        assert line(client) == ["a", "b"]
        assert not client.exists(LOCK)
        assert broker.given() == []
        broker.lines.give_back(LOCK, "a:0:0")  # sent again
        broker.sweep()
        assert broker.given() == ["a"]
        driven(TURN)
        broker.sweep()
        assert broker.given() == ["a"]

    def test_who_has_no_turn_gives_none_back(self, broker, held, client):
        """What waits, runs or is unknown stays as it is."""
        broker.park("a")
        broker.lines.give_back(LOCK, "a:0:0")
        broker.lines.give_back(LOCK, "x:0:0")
        assert line(client) == ["a"]
        broker.end("first")
        broker.ask("a", 2, marked=True)
        broker.lines.give_back(LOCK, "a:0:0")
        assert line(client) == []
        assert client.hlen(LOCK) == 1

    def test_who_cannot_publish_gives_no_turns(self, broker, held, server, client):
        """A lock released by a program without a broker waits for the sweep."""
        store = server.store(hand_over=lambda turns: pytest.fail(f"given {turns}"))
        broker.park("a")
        assert store.release([LOCK], owner_of("first")) is True
        store.close()
        assert line(client) == ["a"]
        broker.sweep()
        assert broker.given() == ["a"]

    def test_its_token_is_newer_though_the_clock_was_set_back(self, broker, held, driven):
        """Whatever the clock says, and though the turn before it was given up."""
        broker.park("second")
        broker.park("third")
        newest = broker.store.holders(LOCK)[0].token
        driven(-60)
        broker.end("first")
        broker.leave("second")
        assert broker.ask("third", marked=True).tokens[0] > newest


class TestWaitersAndParked:
    def wait(self, broker, owner, place=LONG):
        return broker.store.acquire([LOCK], owner, LONG, "{}", place=place)

    def test_they_stand_in_one_line(self, broker, held, driven, client):
        """Who waits in its slot and who is parked have the lock as they came, by no clock."""
        self.wait(broker, "w1")
        driven(-60)
        broker.park("a")
        driven(-60)
        self.wait(broker, "w2")
        assert line(client) == ["w1", "a", "w2"]
        broker.end("first")
        assert broker.given() == []
        assert [h.owner for h in broker.store.holders(LOCK)] == ["w1"]
        broker.store.release([LOCK], "w1")
        assert broker.given() == ["a"]
        assert isinstance(self.wait(broker, "w2"), Refused)
        broker.ask("a", copy=2, marked=True)
        broker.end("a", copy=2)
        assert [h.owner for h in broker.store.holders(LOCK)] == ["w2"]

    def test_the_death_of_a_process_takes_its_own_places_alone(self, broker, held, client):
        """Others that wait stay in line."""
        for owner in ("w1@w:1/1", "w2@w:1/1"):
            self.wait(broker, owner)
        broker.store.release_dead([LOCK], "w1@w:1/")
        assert line(client) == ["w2@w:1/1"]

    def test_a_dead_waiter_is_passed_over(self, broker, held, driven):
        """Its place is over: the turn is the parked task's behind it."""
        self.wait(broker, "w1", place=1)
        broker.park("a")
        driven(1)
        broker.end("first")
        assert broker.given() == ["a"]

    def test_a_task_does_not_pass_a_waiter_at_a_lock_that_nobody_has(self, broker, driven):
        """The holder's lease has run out, and nobody has handed the lock on yet."""
        broker.ask("first", ttl=10)
        self.wait(broker, "w1")
        driven(10)
        assert broker.store.holders(LOCK) == []
        assert isinstance(broker.park("a"), Parked)
        assert [h.owner for h in broker.store.holders(LOCK)] == ["w1"]

    def test_news_of_a_lease_that_has_ended_is_not_read(self, broker, driven):
        """A waiter that was stopped when it was handed the lock asks again, and waits again."""
        broker.ask("first", ttl=1)
        broker.store.acquire([LOCK], "stopped", 1, "{}", place=LONG)
        driven(1)
        assert isinstance(self.wait(broker, "other"), Refused)
        assert [h.owner for h in broker.store.holders(LOCK)] == ["stopped"]
        driven(1)
        assert isinstance(self.wait(broker, "other"), Granted)
        assert isinstance(broker.store.acquire([LOCK], "stopped", 1, "{}", place=LONG), Refused)
        assert broker.store.wait(LOCK, "stopped", 1.0) is None

    def test_who_gives_up_lets_the_parked_have_their_turn(self, broker, driven):
        """The lock is free, and the waiter in front of it leaves."""
        broker.ask("first", ttl=10)
        self.wait(broker, "w1")
        broker.park("a")
        driven(10)
        broker.store.release([LOCK], "w1")
        assert broker.given() == ["a"]

    def test_a_waiter_does_not_take_a_turn_that_it_cannot_publish(self, broker, driven):
        """An acquirer that finds the lock free behind a parked task waits for who can."""
        broker.ask("first", ttl=10)
        broker.park("a")
        driven(10)
        answer = self.wait(broker, "w1")
        assert answer == Refused("", TURN, {"parked": True})
        broker.sweep()
        assert broker.given() == ["a"]


class TestManyAtATime:
    def test_a_long_line_of_shared_ones_leaves_in_parts(self, broker, held, client):
        """No script gives more than a hundred turns: whoever claims one has the next ones given."""
        tasks = [f"s{n}" for n in range(230)]
        for task in tasks:
            broker.park(task, **SHARED)
        broker.end("first")
        assert broker.given() == tasks[:100]
        assert isinstance(broker.ask("s7", 2, marked=True, **SHARED), Granted)
        assert broker.given() == tasks[100:200]
        assert isinstance(broker.ask("s3", 2, marked=True, **SHARED), Granted)
        assert broker.given() == tasks[200:]
        assert line(client) == []

    def test_turns_that_have_run_out_come_again_in_their_order(self, broker, driven, client):
        """Each of several that have their turn at once goes back to its own place."""
        for task in "xy":
            broker.ask(task, limit=2)
        for task in "bac":
            broker.park(task, limit=2)
        for task in "xy":
            broker.end(task)
        driven(TURN)
        broker.sweep()
        assert broker.given() == ["b", "a"] * 2
        assert line(client) == ["c"]

    def test_a_turn_is_not_claimed_in_another_mode(self, broker, client):
        """A task that was parked as shared, and is exclusive now, does not run beside others."""
        broker.ask("first")
        broker.park("a", **SHARED)
        broker.park("b", **SHARED)
        broker.end("first")
        assert isinstance(broker.ask("a", copy=2, marked=True, **SHARED), Granted)
        assert not isinstance(broker.ask("b", copy=2, marked=True), Granted)
        broker.end("a", copy=2)
        broker.sweep()
        assert isinstance(broker.ask("b", copy=3, marked=True), Granted)

    def test_a_turn_that_is_claimed_as_shared_lets_shared_ones_in(self, broker, held):
        """A task that was parked as exclusive, and is shared now, does not run alone."""
        broker.park("a")
        broker.park("b", **SHARED)
        broker.end("first")
        assert broker.given() == ["a"]
        assert isinstance(broker.ask("a", copy=2, marked=True, **SHARED), Granted)
        assert broker.given() == ["b"]

    def test_a_lease_is_not_cut_by_what_is_reserved_in_the_same_step(self, broker, driven):
        """A waiter that gets a counted lock itself, and lets the next in, keeps its own lease."""
        for owner in ("x", "y"):
            broker.store.acquire([LOCK], owner, 10, "{}", terms=Terms(limit=2))
        for owner in ("w1", "w2"):
            broker.store.acquire([LOCK], owner, 30, "{}", terms=Terms(limit=2), place=LONG)
        driven(10)
        assert isinstance(
            broker.store.acquire([LOCK], "w1", 30, "{}", terms=Terms(limit=2), place=LONG), Granted
        )
        driven(6)
        assert [h.owner for h in broker.store.holders(LOCK)] == ["w1"]

    def test_a_lease_that_has_ended_is_not_revived_by_its_release(self, broker, driven):
        """Nor left to run out after its minimum: others may have had the lock since."""
        for owner, ttl in (("ended", 1), ("other", 10)):
            broker.store.acquire([LOCK], owner, ttl, "{}", terms=Terms(limit=2))
        driven(1)
        assert broker.store.release([LOCK], "ended", Ending(at_least=LONG)) is False
        assert [h.owner for h in broker.store.holders(LOCK)] == ["other"]


class TestSweep:
    def test_a_line_that_is_swept_does_not_end_by_itself(self, broker, held, driven, client):
        """Half a year behind one holder: a line lives as long as somebody looks at it."""
        broker.park("a")
        for _ in range(26):
            driven(7 * 86400)
            broker.store.acquire([LOCK], owner_of("first"), LONG, "{}")
            broker.sweep()
        assert line(client) == ["a"]
        broker.end("first")
        assert broker.given()[-1:] == ["a"]

    def test_a_claim_whose_copy_never_came_is_forgotten(self, broker, held, driven, client):
        """After seven days no broker delivers it any more; others that run stay."""
        broker.park("a")
        broker.park("b")
        broker.end("first")
        broker.ask("a", copy=2, marked=True, ttl=10)
        driven(10)
        broker.sweep()
        driven(6 * 86400)
        broker.ask("b", copy=2, marked=True, ttl=10)
        driven(86400)
        broker.sweep()
        assert client.hkeys(f"{LOCK}:running") == ["b:0:0"]

    def test_a_line_whose_lock_is_damaged_is_told(self, redis_url, redis_client):
        """A key of another kind spoils its own line only."""
        broker = Broker(real(redis_url))
        redis_client.set(name_of("odd"), "no lock", ex=60)
        found = broker.lines.sweep([name_of("odd"), LOCK])
        assert isinstance(found.pop(name_of("odd")), DamagedLockError)
        assert found == {LOCK: Swept(0, {})}
        broker.store.close()


class TestAnotherTaskOfTheSameId:
    """Who may write to one queue sends a task of his own under the id of another's."""

    @pytest.fixture
    def shown(self, broker, held):
        """The task is in line; give what a ticket of the other one would be."""
        broker.park("a", message=stored("a", "shop.pay"))
        return Ticket("a:0:0", "a@", marked=True, message=b"", task="shop.spy")

    def ask(self, broker, shown):
        mine = broker.lines.park(LOCK, "a@w2/1", LONG, "{}", shown)
        assert isinstance(mine, Refused)
        assert (mine.holder, mine.place) == ({"id": "a", "parked": True}, 0)

    def take_out(self, broker, shown):
        assert not broker.lines.leave(LOCK, "a:0:0", shown.task)
        assert not broker.lines.move_out(LOCK, "a:0:0", "", shown.task)
        for delivery in ("", "delivery", ENDED):
            assert not broker.lines.withdraw(LOCK, "a:0:0", delivery, shown.task)

    def test_it_neither_takes_it_out_of_line_nor_runs_in_its_place(
        self, broker, held, server, shown
    ):
        """In line, at its turn, and when it has lost its place: the other one goes on."""
        before = snapshot(server)
        self.ask(broker, shown)
        self.take_out(broker, shown)
        assert snapshot(server) == before
        broker.end("first")
        assert broker.given() == ["a"]
        self.ask(broker, shown)
        self.take_out(broker, shown)
        claimed = broker.lines.park(LOCK, "a@w1/2", LONG, "{}", shown._replace(task="shop.pay"))
        assert isinstance(claimed, Granted)
        assert claimed.claimed

    @pytest.mark.parametrize("name", ["shop.pay", 'with "quotes"', "Ünï", "\\", ""])
    def test_its_own_message_is_its_own_whatever_its_name_is(self, broker, held, name):
        """Names are compared as the message writes them; one that is not known is any."""
        broker.park("b", message=stored("b", name))
        assert broker.lines.leave(LOCK, "b:0:0", name)
        broker.park("c", message=stored("c", None))  # message protocol 1 has no such header
        assert broker.lines.leave(LOCK, "c:0:0", name)


class TestBounds:
    @pytest.mark.parametrize("room", [{"most": 1}, {"most_bytes": 300}])
    def test_a_message_that_says_it_was_parked_needs_room_too(self, broker, held, client, room):
        """Its record may have been lost, or it is forged: it is told to come again."""
        broker.park("a", message=b"m" * 200, bounds=Bounds(**room))
        full = broker.park("b", message=b"m" * 200, marked=True, bounds=Bounds(**room))
        assert isinstance(full, Full)
        replacing = Bounds(**room, overflow="replace")
        parked = broker.park("b", message=b"m" * 200, marked=True, bounds=replacing)
        assert parked.replaced == {"a:0:0": b"m" * 200}
        assert line(client) == ["b"]

    @pytest.mark.parametrize(
        ("in_line", "comes", "stays"),
        [(2, 1, "a"), (1, 2, "b"), (1, 1, "b"), (None, 1, "b"), (1, None, "b")],
        ids=["older", "newer", "the same time", "not known in line", "not known"],
    )
    def test_the_one_that_was_sent_last_stays(self, broker, held, client, in_line, comes, stays):
        """Workers reach the lock in any order; the senders say when they sent."""
        bounds = Bounds(1, overflow="replace")

        def sent(at):
            return (
                b"{}" if at is None else b'1 {"a":0,"headers":{"dislock":{"v":1,"sent":%d}}}' % at
            )

        messages = {"a": sent(in_line), "b": sent(comes)}
        broker.park("a", message=messages["a"], bounds=bounds)
        answer = broker.park("b", message=messages["b"], bounds=bounds)
        assert line(client) == [stays]
        (goes,) = {"a", "b"} - {stays}
        assert (type(answer), answer.place) == (Parked, 1)
        assert answer.replaced == {f"{goes}:0:0": messages[goes]}

    @pytest.mark.parametrize(
        "written",
        [
            b'1 {"a":0,"headers":{"":",\\"headers\\":{\\"dislock\\":{\\"v\\":1,\\"sent\\":1"}}\n',
            b'1 {"a":0,"headers":{"x":{"dislock":{"v":1,"sent":1}}}}\n[]',
            b'1 {"a":0,"headers":{"dislock":{"v":12,"sent":1}}}\n[]',
            b'1 {"a":0,"headers":{}}\n,"headers":{"dislock":{"v":1,"sent":1}}',
        ],
        ids=["in a text", "in another header", "of a later version", "in the body"],
    )
    def test_the_time_of_sending_is_a_note_and_nothing_else(self, broker, held, client, written):
        """An argument that looks like it does not make its task the older one."""
        bounds = Bounds(1, overflow="replace")
        broker.park(
            "a", message=b'1 {"a":0,"headers":{"dislock":{"v":1,"sent":2}}}\n[]', bounds=bounds
        )
        broker.park("b", message=written, bounds=bounds)
        assert line(client) == ["b"]

    def test_those_who_wait_in_their_slot_do_not_make_room(self, broker, held, client):
        """Nor do they count: the oldest parked task does, from the middle of the line."""
        wait = broker.store.acquire
        wait([LOCK], "w1", LONG, "{}", place=LONG)
        broker.park("a")
        wait([LOCK], "w2", LONG, "{}", place=LONG)
        broker.park("b", bounds=Bounds(1, overflow="replace"))
        assert line(client) == ["w1", "w2", "b"]

    def test_as_many_of_the_oldest_make_room_as_it_needs(self, broker, held, client):
        """A long message takes the place of several short ones, and of no more."""
        for task in "abcd":
            broker.park(task, message=b"m" * 150)
        room = Bounds(most_bytes=900, overflow="replace")
        answer = broker.park("e", message=b"m" * 400, bounds=room)
        assert sorted(answer.replaced) == ["a:0:0", "b:0:0"]
        assert line(client) == ["c", "d", "e"]

    @pytest.mark.parametrize("overflow", ["skip", "replace"])
    def test_what_is_longer_than_the_bound_takes_nobodys_place(
        self, broker, held, client, overflow
    ):
        """It could never be parked, whoever made room."""
        broker.park("a")
        before = left(client), line(client)
        bounds = Bounds(most_bytes=1000, overflow=overflow)
        assert isinstance(broker.park("b", message=b"m" * 1000, bounds=bounds), Full)
        assert (left(client), line(client)) == before


class TestLeaving:
    def test_who_moves_out_runs_elsewhere(self, broker, held):
        """Its turn is given on, and it is not done here; sent again, it is not either."""
        broker.park("a")
        broker.park("b")
        broker.end("first")
        assert broker.given() == ["a"]
        for _ in range(2):
            assert broker.lines.move_out(LOCK, "a:0:0") is False
        assert broker.given() == ["b"]
        assert isinstance(broker.ask("a", copy=2, marked=True), Refused)

    def test_what_was_done_does_not_run_elsewhere(self, broker, held, server):
        """A copy that moves out after its work was done is told so, and changes nothing."""
        broker.park("a")
        broker.end("first")
        broker.ask("a", copy=2, marked=True)
        broker.end("a", copy=2)
        before = snapshot(server)
        assert broker.lines.move_out(LOCK, "a:0:0") is True
        assert snapshot(server) == before


class TestFreeing:
    """A person ends a lease that was shown."""

    def token(self, broker):
        return broker.store.holders(LOCK)[0].token

    @pytest.mark.parametrize("left", [True, False])
    def test_the_lease_that_was_shown_and_no_other_is_ended(self, broker, held, left):
        """Also one that only runs out; another one of its owner has another token."""
        owner, shown = owner_of("first"), self.token(broker)
        if left:
            broker.store.release([LOCK], owner, Ending(at_least=LONG))
        for token in (shown - 1, shown + 1):
            assert broker.store.free(LOCK, owner, token) is False
        assert broker.store.free(LOCK, owner, shown) is True
        assert broker.store.holders(LOCK) == []

    def test_on_several_servers_an_older_token_is_meant_as_well(self, broker, held, server):
        """Each has one of its own, and the newest of them was shown."""
        shown = self.token(broker)
        for token, ended in ((shown - 1, 0), (shown + 1, 1)):
            asked = owner_of("first"), token, "here", "1"
            assert server.run(scripts.FREE, [LOCK], *asked) == ended

    def test_a_turn_goes_to_the_end_of_the_line(self, broker, held, client):
        """Its record says so, too, so that it comes there again."""
        broker.park("a")
        broker.park("b")
        broker.end("first")
        assert broker.store.free(LOCK, "a:0:0#", self.token(broker))
        assert broker.given() == ["a", "b"]
        assert line(client) == ["a"]
        record = client.hget(f"{LOCK}:tickets", "a:0:0")
        assert int(record.split()[1]) == client.zscore(f"{LOCK}:line", "a:0:0#")

    def test_a_waiter_that_was_handed_the_lock_finds_no_news_of_it(self, broker, held):
        """It waits again, and does not run without a lease."""
        broker.store.acquire([LOCK], "w", LONG, "{}", place=LONG)
        broker.end("first")
        assert broker.store.free(LOCK, "w", self.token(broker))
        assert broker.store.wait(LOCK, "w", 1.0) is None


class TestSettling:
    """Claims of tasks that have ended, and whose last release may never come."""

    def settle(self, broker, task, copy=2, seconds=TURN, **terms):
        """The body ends, and its result is on its way."""
        ticket = f"{task}:0:0"
        broker.store.release(
            [LOCK], owner_of(task, copy), Ending(ticket=ticket, settles=seconds, **terms)
        )

    @pytest.mark.parametrize("marked", [True, False])
    def test_a_copy_does_not_run_while_the_result_is_on_its_way(self, broker, held, driven, marked):
        """Though the lock is free: its own task is named as the holder, so that the copy waits."""
        broker.park("a")
        broker.end("first")
        broker.ask("a", copy=2, marked=True)
        self.settle(broker, "a")
        driven(TURN - 1)
        for ask in broker.ask, broker.park:
            refused = ask("a", copy=3, marked=marked)
            assert (type(refused), refused.holder["id"], refused.place) == (Refused, "a", 0)

    @pytest.mark.parametrize("is_swept", [True, False])
    def test_a_claim_whose_last_release_was_lost_ends_by_itself(
        self, broker, held, driven, client, is_swept
    ):
        """The sweep keeps it for two hours, in which a copy may come; without one it ends, too."""
        broker.park("a")
        broker.end("first")
        broker.ask("a", copy=2, marked=True)
        self.settle(broker, "a")
        driven(TURN)
        assert isinstance(broker.ask("a", copy=3, marked=True), Granted)  # its process died
        self.settle(broker, "a", copy=3)
        driven(TURN + 2 * HOUR - 1)
        broker.sweep()
        assert client.hkeys(f"{LOCK}:running") == ["a:0:0"]
        driven(1 if is_swept else 7 * 24 * HOUR)
        if is_swept:
            broker.sweep()
        assert left(client) == set()

    def test_claims_of_bodies_that_run_are_kept_beside_it(self, broker, driven, client):
        """Of several that share the lock, what has settled ends; what may come again stays."""
        broker.ask("first")
        for task in "ab":
            broker.park(task, **SHARED)
        broker.end("first")
        for task in "ab":
            broker.ask(task, copy=2, marked=True, ttl=TURN, **SHARED)
        self.settle(broker, "a")
        driven(TURN + 2 * HOUR)
        broker.sweep()
        assert client.hkeys(f"{LOCK}:running") == ["b:0:0"]
        driven(7 * 24 * HOUR)
        assert left(client) == set()


AWKWARD_IDS = [
    "bytes",
    "x#",
    "order:7",
    "a%40b",
    "~a",
    "a@w:1/",
    "two\nlines",
    "Ünï",
    "\ud800",
    "x" * 100_000,
]


class TestAwkwardIds:
    """Task ids come from users, and from whoever can publish a message."""

    def ask(self, broker, task_id, copy=1, *, message=b"", marked=False, pid=1):
        name = ticket_name(task_id, 0, 0)
        shown = Ticket(name, owners_start(task_id), marked, message)
        owner = f"{execution_start(task_id, 'w', pid)}nonce.{copy}"
        return self.park(broker, owner, json.dumps({"id": shown_id(task_id)}), shown), owner, name

    def park(self, broker, owner, holder, shown):
        return broker.lines.park(LOCK, owner, LONG, holder, shown)

    @pytest.mark.parametrize("task_id", AWKWARD_IDS, ids=lambda one: ascii(one)[:12])
    def test_a_task_of_any_id_is_parked_and_runs(self, broker, held, task_id, client):
        """It waits with another, has its turn and ends; the other and the count of bytes stay."""
        broker.park("other")
        parked, *_ = self.ask(broker, task_id, message=b"m")
        assert (type(parked), parked.place) == (Parked, 2)
        broker.end("first")
        broker.ask("other", copy=2, marked=True)
        assert broker.given() == ["other"]
        broker.end("other", copy=2)
        (turn,) = broker.published
        granted, owner, name = self.ask(broker, task_id, 2, marked=True)
        assert (turn.ticket, turn.message) == (name, b"m")
        assert isinstance(granted, Granted)
        assert broker.store.holders(LOCK)[0].id == shown_id(task_id)
        assert broker.store.release([LOCK], owner, Ending(ticket=name))
        assert isinstance(self.ask(broker, task_id, 3, marked=True)[0], Done)
        assert left(client) == set()

    @pytest.mark.parametrize("task_id", ["a@w:1/", "a@w:1/x", "~a", "a", "a:0"])
    def test_a_task_is_not_taken_for_another_of_which_it_has_the_beginning(
        self, broker, client, task_id
    ):
        """The death of a task's process ends no other's lease, and no other's turn."""
        self.ask(broker, task_id)
        other = "b" if task_id == "a" else "a"
        answer, *_ = self.ask(broker, other)
        assert answer.place == 1  # not as a copy of what runs, which has no place
        assert broker.store.release_dead([LOCK], execution_start(other, "w", 1)) == 0
        assert len(broker.store.holders(LOCK)) == 1
        assert broker.store.release_dead([LOCK], execution_start(task_id, "w", 1)) == 1

    def test_a_mark_of_a_success_is_no_mark_of_a_ticket(self, broker, client):
        """A task whose id looks like another's ticket cannot say that the other has run."""
        broker.store.remember(LOCK, "a:0:0", "done 0", 60)
        assert isinstance(broker.ask("a"), Granted)


class TestDamage:
    """Somebody has written under one of a lock's names."""

    @pytest.fixture
    def broker(self, redis_url, redis_client):
        broker = Broker(real(redis_url))
        yield broker
        broker.store.close()

    @pytest.mark.parametrize(
        ("end", "kind"),
        [
            ("", "hash"),
            (":line", "zset"),
            (":tickets", "hash"),
            (":handed", "zset"),
            (":running", "hash"),
        ],
    )
    def test_a_key_of_another_type_is_named(self, broker, redis_client, end, kind):
        """The error says which key, what it is and what to do; other locks are as before."""
        broker.ask("first")
        redis_client.delete(LOCK + end)
        redis_client.set(LOCK + end, "by hand", ex=60)
        with pytest.raises(DamagedLockError) as caught:
            broker.park("a")
        assert caught.value.lock == LOCK
        assert f"{LOCK + end!r} is a string, not a {kind}" in str(caught.value)
        assert "delete" in str(caught.value)
        assert isinstance(broker.ask("a", lock=name_of("other")), Granted)

    @pytest.mark.parametrize(
        "record",
        [
            *("2 1 1 1 x {}", "by hand", "", "1 1 1 1 z {}", "1 9 9 x", "\0\n\xff" * 100),
            *(f"1 {'9' * 400} 1 1 x {{}}", f"1 {FAR} {'9' * 400} 1 x {{}}"),
            *(f"1 {FAR} 1 {'9' * 400} x {{}}", "1 100030000000000000 1 1 x {}"),
        ],
        ids=[
            *("a later version", "by hand", "empty", "mode", "short", "bytes"),
            *("end", "token", "since", "year 3170843"),
        ],
    )
    @BOTH
    def test_a_lease_that_cannot_be_read_is_told(self, broker, redis_client, record):
        """Nobody takes a lock of which nobody can tell whether it is held; the record is shown."""
        redis_client.hset(LOCK, "somebody", record)
        for ask in (broker.ask, broker.park):
            with pytest.raises(DamagedLockError, match="a lease in it cannot be read") as caught:
                ask("a")
        assert record.partition("\0")[0][:60] in str(caught.value)
        assert len(str(caught.value)) < 500
        for call in (broker.store.acquire, broker.store.release_dead):
            with pytest.raises(DamagedLockError):
                call([LOCK], "b", *((LONG, "{}") if call == broker.store.acquire else ()))
        assert redis_client.hget(LOCK, "somebody") == record

    @pytest.mark.parametrize("holder", ["x", "[1]", "7", "null", "{", "[" * 100_000, '"text"', ""])
    def test_a_holder_that_is_no_object_is_shown_as_it_is(self, broker, redis_client, holder):
        """The lock is held, by whom cannot be told: who asks is refused, and fails for nothing."""
        broker.ask("first")
        owner, lease = redis_client.hgetall(LOCK).popitem()
        redis_client.hset(LOCK, owner, lease.partition("{")[0] + holder)
        for answer in (broker.ask("a"), broker.store.acquire([LOCK], "b", LONG, "{}")):
            assert "record cannot be read" in in_words(answer.holder)
            assert len(in_words(answer.holder)) < 100
        assert "record cannot be read" in broker.store.holders(LOCK)[0].who


class TestSetAside:
    @pytest.fixture
    def damage(self, server):
        """Write something of the same length in the place of a record."""

        def damage(task, begin=b"garbage \0\n\xff"):
            raw = server.client()
            record = raw.hget(f"{LOCK}:tickets", f"{task}:0:0")
            raw.hset(f"{LOCK}:tickets", f"{task}:0:0", begin + record[len(begin) :])
            return begin + record[len(begin) :]

        return damage

    def aside(self, server):
        return server.client().hgetall(f"{LOCK}:aside")

    @pytest.mark.parametrize("begin", [b"garbage \0\n\xff", b"2 "], ids=["damaged", "newer"])
    def test_a_record_that_cannot_be_read_is_kept_for_people(
        self, broker, held, damage, client, server, begin
    ):
        """The caller is told of it by a turn without a message, and the next has its turn."""
        broker.park("a")
        broker.park("b")
        record = damage("a", begin)
        broker.end("first")
        assert broker.published == [Turn(LOCK, "a:0:0", b""), turn_of("b")]
        assert self.aside(server) == {b"a:0:0": record}
        assert line(client) == []

    def test_one_whose_turn_ran_out(self, broker, held, damage, driven, server):
        """It was damaged while its message was on its way: it does not hold up the line."""
        broker.park("a")
        broker.park("b")
        broker.end("first")
        broker.given()
        damage("a")
        driven(TURN)
        broker.sweep()
        assert broker.published == [Turn(LOCK, "a:0:0", b""), turn_of("b")]
        assert list(self.aside(server)) == [b"a:0:0"]

    def test_one_that_is_to_make_room(self, broker, held, damage, client, server):
        """It makes room, and nobody is told of an end that cannot be told."""
        broker.park("a")
        damage("a")
        assert broker.park("b", bounds=Bounds(1, overflow="replace")).replaced == {}
        assert line(client) == ["b"]
        assert list(self.aside(server)) == [b"a:0:0"]

    @pytest.mark.parametrize("turn", [True, False], ids=["has its turn", "waits"])
    def test_one_whose_message_comes(self, broker, held, damage, turn):
        """A copy of it raises nothing that would send it round for ever."""
        broker.park("a")
        if turn:
            broker.end("first")
        damage("a")
        broker.ask("a", copy=2)
        broker.end("first")
        assert isinstance(broker.ask("a", copy=3), (Granted, Refused, Done))

    def test_a_record_that_has_gone_is_no_obstacle(self, broker, held, client, server):
        """Half of the state lost: the line goes on, and nothing is set aside without its record."""
        broker.park("a")
        broker.park("b")
        length = client.hstrlen(f"{LOCK}:tickets", "a:0:0")
        client.hdel(f"{LOCK}:tickets", "a:0:0")
        client.hincrby(f"{LOCK}:tickets", "bytes", -length)
        broker.end("first")
        assert broker.published == [Turn(LOCK, "a:0:0", None), turn_of("b")]
        assert line(client) == []
        assert self.aside(server) == {}

    def test_a_message_that_python_cannot_read_is_kept_too(self, broker, held, server):
        """Whoever was to publish it gives it back, and its turn to the next."""
        broker.park("a", message=b"unreadable")
        broker.park("b")
        broker.end("first")
        broker.given()
        assert broker.lines.set_aside(LOCK, "a:0:0", b"unreadable") == [turn_of("b")]
        assert broker.given() == []
        assert self.aside(server) == {b"a:0:0": b"unreadable"}


class TestWhatIsLeft:
    def test_nothing_but_marks_of_what_is_done(self, broker, held, driven, client):
        """When all are done, the lock has no key any more; the marks end after two hours."""
        for task in "abc":
            broker.park(task)
        broker.end("first")
        for task in "abc":
            broker.ask(task, copy=2, marked=True)
            broker.end(task, copy=2)
        assert not left(client)
        assert set(client.keys("*")) == {f"{LOCK}:done:{task}:0:0" for task in "abc"}
        driven(7199)
        assert broker.ask("a", copy=3) == Done()
        driven(1)
        assert not client.keys("*")


class TestMarks:
    """A task that is done has a mark."""

    @pytest.fixture(autouse=True)
    def one_is_done(self, broker):
        broker.ask("done", marked=True)
        broker.end("done")

    @pytest.mark.parametrize(
        "ticket", ["done:1:0", "done:0:1", "DONE:0:0", "done:00:0", "done0:0:0"]
    )
    def test_what_is_no_copy_has_another_mark(self, broker, ticket):
        """A retry, a task replaced by itself, and one whose id differs in case are other work."""
        shown = Ticket(ticket, "other@", True)
        answer = broker.lines.park(LOCK, "other@w:1/1", LONG, "{}", shown)
        assert isinstance(answer, Granted)
        assert broker.store.release([LOCK], "other@w:1/1", Ending(ticket=ticket))
        assert broker.lines.park(LOCK, "other@w:1/2", LONG, "{}", shown) == Done()
        assert broker.ask("done", copy=2) == Done()


class TestIndex:
    def test_it_ends_by_itself(self, broker, driven, client):
        """After thirty days in which nobody parked; the lines have ended by then."""
        broker.lines.enlist(LOCK)
        driven(29 * 86400)
        assert client.exists(INDEX)
        driven(86400)
        assert not client.exists(INDEX)

    def test_a_line_that_is_still_there_is_still_found(self, broker, held, driven, client):
        """A line that is swept lives on behind its holder, and so does its name in the index."""
        broker.lines.enlist(LOCK)
        broker.park("a")
        for _ in range(5):
            driven(7 * 86400)
            broker.store.acquire([LOCK], owner_of("first"), LONG, "{}")
            _, _, found = broker.lines.page(b"0", 100)
            broker.lines.sweep(list(found))
        assert line(client) == ["a"]
        assert list(broker.lines.page(b"0", 100)[2]) == [LOCK]


@pytest.fixture(scope="module")
def cluster(
    redis_program: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisCluster]:
    with RedisCluster(tmp_path_factory.mktemp("lines"), node_timeout=60_000) as cluster:
        yield cluster


class TestInACluster:
    @pytest.fixture
    def broker(self, cluster) -> Iterator[Broker]:
        for master in cluster.masters:
            with master.client() as client:
                client.flushall()
        broker = Broker(real(cluster.url))
        yield broker
        broker.store.close()

    def test_all_that_is_a_locks_is_in_its_slot(self, broker, cluster):
        """Every script is sent to one node and finds all there; the index is a key like any."""
        bounds = Bounds(2, overflow="replace")
        broker.ask("first")
        broker.lines.enlist(LOCK)
        for task in "abc":
            broker.park(task, bounds=bounds)
        broker.end("first")
        broker.ask("b", copy=2, marked=True)
        broker.lines.set_aside(LOCK, "c:0:0", b"for people")
        broker.end("b", copy=2)
        broker.ask("second")
        broker.park("d")
        broker.end("second")
        broker.park("e")
        broker.ask("d", copy=2, marked=True)
        broker.park("f")
        names = set()
        for master in cluster.masters:
            with master.client() as client:
                names |= set(map(_text, client.keys("*")))
        beside = {name.removeprefix(f"{LOCK}:").partition(":")[0] for name in names - {LOCK, INDEX}}
        assert beside == {"line", "tickets", "running", "replaced", "aside", "done"}
        assert len({key_slot(name.encode()) for name in names - {INDEX}}) == 1
        assert broker.given() == ["b", "d"]

    def test_the_store_of_a_cluster_has_one_name(self, broker):
        """Its key has a slot of its own, like the list of lines."""
        server = broker.store.lock_server
        name = StoreIdentity(server, "dislock").name()
        assert StoreIdentity(server, "dislock").confirm() == name
        assert StoreIdentity(server, "old").name() != name

    def test_one_sweep_looks_at_lines_of_all_nodes(self, broker, cluster, monkeypatch):
        """A page names locks of many slots; each has its turn from one call."""
        text = scripts.ENLIST.text.replace("YOUNG_US = 60000000", "YOUNG_US = 0")
        at_once = Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())
        monkeypatch.setattr(scripts, "ENLIST", at_once)
        locks = [name_of(f"key{number}") for number in range(30)]
        assert len({cluster_node(cluster, lock) for lock in locks}) == 3
        for number, lock in enumerate(locks):
            broker.store.acquire([lock], "holder", LONG, "{}")
            broker.lines.enlist(lock)
            broker.park(f"t{number}", lock=lock)
        plain = Store(cluster.url)
        for lock in locks:
            plain.release([lock], "holder")
        plain.close()
        total, cursor, found = broker.lines.page(b"0", 100)
        assert (total, cursor, set(found)) == (30, b"0", set(locks))
        assert broker.lines.sweep(list(found)) == {lock: Swept(1, {}) for lock in locks}
        assert sorted(broker.given()) == sorted(f"t{number}" for number in range(30))
        for lock in locks:
            broker.lines.delist(lock, found[lock])
        assert broker.lines.page(b"0", 100) == (0, b"0", {})


def cluster_node(cluster, lock):
    """Return the number of the master that has the lock: they have a third of the slots each."""
    return key_slot(lock.encode()) * len(cluster.masters) // 16384


def _text(name):
    return name.decode() if isinstance(name, bytes) else name


class TestWithdraw:
    """A parked task that cannot claim its turn leaves the line."""

    @pytest.fixture
    def raw(self, server):
        return server.client()  # speaks bytes: messages are no text

    @pytest.mark.parametrize("has_its_turn", [False, True])
    def test_it_is_set_aside_with_its_record(self, broker, held, raw, client, has_its_turn):
        """In line or with its turn: what is kept is all that there was; the next has its turn."""
        for task in ("head", "next"):
            broker.park(task)
        if has_its_turn:
            broker.end("first")
            assert broker.given() == ["head"]
        record = raw.hget(f"{LOCK}:tickets", "head:0:0")
        assert broker.withdraw("head") is True
        assert raw.hgetall(f"{LOCK}:aside") == {b"head:0:0": record}
        assert broker.given() == ["next"] * has_its_turn
        assert line(client) == ["next"] * (not has_its_turn)
        assert broker.withdraw("head") is False
        if has_its_turn:
            assert isinstance(broker.ask("next", marked=True), Granted)

    def test_who_is_not_there_is_not_set_aside(self, broker, held, server):
        """An unknown ticket, and the name of the byte counter, change nothing."""
        broker.park("head")
        before = snapshot(server)
        for ticket in ("other:0:0", "bytes", ""):
            assert broker.lines.withdraw(LOCK, ticket) is False
        assert snapshot(server) == before

    def test_a_copy_of_what_was_set_aside_does_not_run(self, broker, held):
        """Its caller was told FAILURE; what people put back is not marked, and runs."""
        broker.park("second")
        broker.withdraw("second")
        assert broker.withdraw("second", "a copy") is False
        broker.end("first")
        assert isinstance(broker.ask("second", marked=True), Done)
        assert isinstance(broker.ask("second"), Granted)


def test_a_sweep_tells_who_has_not_claimed_many_turns(broker, held, driven):
    """From the fourth turn on, until one is claimed: somebody finds out whether it still can be."""
    broker.park("head")
    broker.end("first")
    for turn in range(6):
        assert broker.sweep().unclaimed == (("head:0:0",) if turn >= 3 else ())
        driven(TURN * 2**turn)
    assert broker.sweep().unclaimed == ("head:0:0",)
    assert isinstance(broker.ask("head", marked=True), Granted)
    assert broker.sweep().unclaimed == ()
