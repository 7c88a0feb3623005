"""Parked tasks where a simulation seldom goes, or does not look: examples, each of one promise.

They are about those who wait in a slot beside the parked, bounds in bytes, marks that end, damage,
long lines, and a cluster.  The scripts run in this process; damage of types is a real server's.
"""

import json
from itertools import count
from types import SimpleNamespace

import pytest
from lupa.lua51 import LuaError

from celery_dislock import scripts
from celery_dislock.exceptions import DamagedLockError
from celery_dislock.keys.names import execution_start, shown_id, ticket_of_request
from celery_dislock.messages.message import Message
from celery_dislock.parking.answers import Swept
from celery_dislock.parking.store import ASIDE, ENDED, OVER, RUNS, UNREAD, Ticket
from celery_dislock.scripts import NOT_THERE
from celery_dislock.servers.records import in_words
from celery_dislock.servers.replies import Turn
from celery_dislock.servers.store import Store
from tests.conftest import BOTH
from tests.holding import name_of
from tests.integration.lua_server import LuaServer
from tests.integration.parked import (
    INDEX,
    LOCK,
    LONG,
    REPLACES,
    TURN,
    Answer,
    Bounds,
    Line,
    left,
    message_of,
    owner_of,
    sent,
    snapshot,
)
from tests.integration.strange import FAR

OTHER = name_of("other")
LAST_TURN = 300  # seconds
HOUR, DAY = 3600, 86400  # seconds
SHARED = {"mode": "shared"}


def real(url):
    """Return a server of that URL, as a LuaServer is one."""
    return SimpleNamespace(
        store=lambda **options: Store(url, **options), client=lambda: Store(url).lock_server
    )


def turn_of(task):
    return Turn(LOCK, f"{task}:0:0", message_of(task))


@pytest.fixture
def broker(server):
    """A worker; what a test leaves behind ends by itself, and its bytes are counted right."""
    broker = Line(server)
    yield broker
    server.end_keys()
    assert all(ttl > 0 for ttl in server.ttls().values()), server.ttls()
    broker.records()


@pytest.fixture
def held(broker):
    """The lock is held by the task "first"."""
    assert broker.ask("first") == "granted"


class TestTurns:
    @pytest.mark.usefixtures("held")
    def test_each_turn_is_twice_as_long_and_none_longer_than_five_minutes(self, broker, server):
        """A slow broker gets the more time the oftener it was too slow, within bounds."""
        broker.line_up("a")
        lasted = []
        for _ in range(10):
            (reserved,) = broker.store.holders(LOCK)
            lasted.append(round(reserved.remaining))
            server.advance(lasted[-1] - 1)
            broker.given()
            broker.sweep()
            assert broker.given() == []
            server.advance(1)
            broker.sweep()
            assert broker.given() == ["a"]
        assert lasted == [5, 10, 20, 40, 80, 160, *[LAST_TURN] * 4]

    @pytest.mark.usefixtures("held")
    @pytest.mark.parametrize("turns", [1, 3])
    def test_a_turn_that_is_kept_is_not_given_again(self, broker, server, turns):
        """It lasts while a worker keeps it, gets no shorter, and ends when none does."""
        broker.line_up("a")
        for length in (TURN, 2 * TURN)[: turns - 1]:
            server.advance(length)
            broker.sweep()
        assert broker.given() == ["a"] * turns
        until = broker.records().until["a"]
        assert broker.keep("a")
        assert broker.records().until["a"] == until
        for _ in range(100):
            server.advance(TURN - 1)
            assert broker.keep("a")
            broker.sweep()
        assert broker.given() == []
        assert broker.records().turns == {"a": turns}
        (kept,) = broker.store.holders(LOCK)
        assert round(kept.remaining) == TURN
        server.advance(TURN)
        assert not broker.keep("a"), "what is over was kept"
        broker.sweep()
        assert broker.given() == ["a"]
        broker.run("a")

    def test_only_the_message_of_a_turn_claims_it(self, broker, held):
        """Another message of its id is acknowledged, and the parked task runs."""
        broker.line_up("a")
        assert broker.park("a", 3) == "parked"
        assert broker.claim("a") == "granted"

    @pytest.mark.usefixtures("held")
    def test_a_turn_whose_lease_was_lost_is_in_line_alone(self, broker, server):
        """Another has the lock when it is claimed: the task waits, and has its turn after that."""
        broker.line_up("a")
        server.send("DEL", LOCK)
        assert broker.ask("b") == "granted"
        assert broker.claim("a") == "parked"
        records = broker.records()
        assert (records.line, records.until) == (["a"], {})
        broker.given()
        broker.end("b")
        assert broker.given() == ["a"]
        broker.run("a", copy=3)

    @pytest.mark.usefixtures("held")
    def test_only_a_turn_is_kept(self, broker, server):
        """Nothing is made for one that waits, was freed, lost its lock, runs, or is done."""
        broker.park("a")
        broker.park("b")
        assert not broker.keep("a")
        broker.end("first")
        [lease] = broker.store.holders(LOCK)
        assert broker.store.free(LOCK, lease.owner, lease.token)
        assert not broker.keep("a")
        broker.run("b")
        server.client().delete(LOCK)  # a failover has lost what the turn keeps
        assert not broker.keep("a")
        assert broker.owners() == []
        assert broker.claim("a") == "granted"
        before = snapshot(server)
        assert not broker.keep("a")
        assert snapshot(server) == before
        broker.end("a", 2)
        assert not broker.keep("a")
        assert not broker.keep("nobody")

    @pytest.mark.parametrize("marked", [True, False])
    def test_a_copy_does_not_run_beside_it_nor_before_its_result(self, broker, held, marked):
        """Its own task is named as the holder, and it has no place: so the copy comes again."""
        broker.line_up("a")
        broker.claim("a")
        for at in ("its body", "its result"):
            for ask in (broker.ask, broker.park):
                told = ask("a", copy=3, marked=marked)
                assert (told, told.holder["id"], told.place) == ("refused", "a", 0), at
            broker.end("a", copy=2, settles=TURN)  # the lock is free then

    @pytest.mark.parametrize("others", ["others wait", "the lock is free"])
    def test_a_request_that_comes_late_parks_no_task_that_found_the_line_full(
        self, others, broker, held
    ):
        """Its caller was told that it is skipped; another delivery of it may be parked."""
        room = {"bounds": Bounds(1)}
        broker.park("a", **room)
        assert broker.park("late", **room) == "full"
        broker.end("first")
        if others == "the lock is free":
            broker.run("a")
        assert broker.park("late", **room) == "full"
        assert "late" not in [*broker.line(), *broker.given(), *broker.records().running]
        assert broker.park("late", copy=2, **room) in {"parked", "granted"}

    def test_a_parked_task_of_which_nothing_is_known_runs_once(self, broker, server):
        """Its record was lost, in a failover say: it is not done, and from then on it is known."""
        assert broker.claim("a", 1) == "granted"
        assert broker.claim("a") == "refused"
        broker.end("a")
        assert broker.claim("a") == "done"
        assert not left(server)

    def test_a_turn_that_is_given_back_is_the_next_sweeps_to_give(self, broker, held, server):
        """Its message could not be published: it has its place again, and turns as long as ever."""
        broker.park("a")
        broker.park("b")
        for task in ("a", "x"):  # who waits, or is not there, has no turn to give back
            broker.give_back(task)
        broker.end("first")
        server.advance(TURN)
        broker.sweep()  # its second turn
        assert broker.given() == ["a", "a"]
        for _ in range(2):  # sent again
            broker.give_back("a")
            assert (broker.line(), broker.owners(), broker.given()) == (["a", "b"], [], [])
        broker.sweep()
        assert broker.given() == ["a"]
        server.advance(TURN)
        broker.sweep()
        assert broker.given() == ["a"]
        assert broker.claim("a") == "granted"
        broker.give_back("a")  # what runs stays
        assert (broker.line(), broker.owners()) == (["b"], [owner_of("a", 2)])

    def test_who_cannot_publish_gives_no_turns(self, broker, held, server):
        """A lock released by a program without a broker waits for the sweep."""
        store = server.store(hand_over=lambda turns: pytest.fail(f"given {turns}"))
        broker.park("a")
        assert store.release([LOCK], owner_of("first")) is True
        assert broker.line() == ["a"]
        broker.sweep()
        assert broker.given() == ["a"]

    def test_a_copy_that_claims_again_lets_others_in(self, broker, server):
        """Its process died and held several of a limit: those in line do not wait for a sweep."""
        for task in "ab":
            broker.ask(task, ttl=60, limit=2)
        for task in "cde":
            broker.park(task, limit=2)
        for task in "ab":
            broker.end(task)
        assert broker.given() == ["c", "d"]
        for task in "cd":
            broker.claim(task, ttl=60, limit=2)
        server.advance(61)
        assert broker.claim("c", 3, ttl=60, limit=2) == "granted"
        assert broker.given() == ["e"]

    def test_who_is_revoked_when_its_record_is_lost_lets_the_next_in(self, broker, held):
        """At once, and not only when somebody sweeps."""
        broker.line_up(*"ab")
        assert broker.given() == ["a"]
        broker.lose("a")
        assert broker.leave("a") is False
        assert broker.given() == ["b"]


class TestBesideThoseWhoWaitInASlot:
    def test_they_stand_in_one_line(self, broker, held, server):
        """Who waits in its slot and who is parked have the lock as they came, by no clock."""
        broker.wait("w1")
        server.advance(-60)
        broker.park("a")
        server.advance(-60)
        broker.wait("w2")
        assert broker.line() == ["w1", "a", "w2"]
        broker.end("first")
        assert (broker.given(), broker.owners()) == ([], ["w1"])
        broker.store.release([LOCK], "w1")
        assert broker.given() == ["a"]
        assert not broker.wait("w2")
        broker.run("a")
        assert broker.owners() == ["w2"]

    def test_the_death_of_a_process_takes_its_own_places_alone(self, broker, held):
        """Others that wait stay in line."""
        for owner in ("w1@w:1/1", "w2@w:1/1"):
            broker.wait(owner)
        broker.store.release_dead([LOCK], "w1@w:1/")
        assert broker.line() == ["w2@w:1/1"]

    def test_a_task_does_not_pass_a_waiter_at_a_lock_that_nobody_has(self, broker, server):
        """The holder's lease has run out, and nobody has handed the lock on yet."""
        broker.ask("first", ttl=10)
        broker.wait("w1")
        server.advance(10)
        assert broker.owners() == []
        assert broker.park("a") == "parked"
        assert broker.owners() == ["w1"]

    def test_news_of_a_lease_that_has_ended_is_not_read(self, broker, server):
        """A waiter that was stopped when it was handed the lock asks again, and waits again."""
        broker.ask("first", ttl=1)
        broker.wait("stopped", ttl=1)
        server.advance(1)
        assert not broker.wait("other")
        assert broker.owners() == ["stopped"]
        server.advance(1)
        assert broker.wait("other")
        assert not broker.wait("stopped", ttl=1)
        assert broker.store.wait(LOCK, "stopped", 1.0) is None

    def test_a_waiter_does_not_take_a_turn_that_it_cannot_publish(self, broker, server):
        """An acquirer that finds the lock free behind a parked task waits for who can."""
        broker.ask("first", ttl=10)
        broker.park("a")
        server.advance(10)
        answer = broker.store.acquire([LOCK], "w1", LONG, "{}", place=LONG)
        assert (answer.remaining, answer.holder) == (TURN, {"parked": True})
        broker.sweep()
        assert broker.given() == ["a"]

    def test_a_lease_that_has_ended_is_not_revived_by_its_release(self, broker, server):
        """Nor left to run out after its minimum: others may have had the lock since."""
        for task, ttl in (("ended", 1), ("other", 10)):
            broker.ask(task, ttl=ttl, limit=2)
        server.advance(1)
        assert broker.end("ended", at_least=LONG) is False
        assert broker.owners() == [owner_of("other")]

    def test_a_waiter_whose_lease_a_person_has_ended_finds_no_news_of_it(self, broker, held):
        """It waits again, and does not run without a lease."""
        broker.wait("w")
        broker.end("first")
        assert broker.store.free(LOCK, "w", broker.store.holders(LOCK)[0].token)
        assert broker.store.wait(LOCK, "w", 1.0) is None


class TestLongLines:
    def test_a_long_line_of_shared_ones_leaves_in_parts(self, broker, held):
        """No script gives more than a hundred turns: whoever claims one has the next ones given."""
        tasks = [f"s{n}" for n in range(230)]
        for task in tasks:
            broker.park(task, **SHARED)
        broker.end("first")
        given = [broker.given()]
        for task in ("s7", "s3"):
            assert broker.claim(task, **SHARED) == "granted"
            given.append(broker.given())
        assert given == [tasks[:100], tasks[100:200], tasks[200:]]
        assert broker.line() == []

    def test_a_long_line_makes_room_in_parts(self, broker, held):
        """No script runs for long: a line beyond its limit is shortened by each that comes."""
        for number in range(250):
            broker.park(f"t{number}")
        for nth, stay in enumerate((151, 52, 1, 1)):
            broker.park(f"new{nth}", bounds=REPLACES)
            assert len(broker.line()) == stay
        assert len(broker.records().replaced) == 253

    def test_nobody_goes_for_one_that_finds_no_room_all_the_same(self, broker, held):
        """More small ones than one script takes out do not make room for a big one."""
        for number in range(150):
            broker.park(f"t{number}", message=b"x" * 100)
        bounds = Bounds(0, 30_000, "replace")
        assert broker.park("big", message=b"x" * 29_000, bounds=bounds) == "full"
        assert len(broker.line()) == 150
        assert broker.park("new", message=b"x" * 10_000, bounds=bounds) == "parked"
        assert len(broker.line()) < 150

    def test_a_reply_brings_a_bounded_number_of_replaced_tasks(self, broker, held):
        """Until their ends are told they become many, and may be large; none stays for ever."""
        for number in range(150):
            assert len(broker.park(f"t{number}", bounds=REPLACES).replaced) <= 100
        told = set()
        while len(told) < 149:
            _, replaced, _ = broker.swept()
            assert 0 < len(replaced) <= 100
            for task in replaced:
                broker.leave(task)
            told |= replaced
        for task, size in (("large", 200_000), ("larger", 200_000)):
            broker.park(task, bounds=REPLACES, message=b"x" * size)
        replaced = broker.park("last", bounds=REPLACES).replaced
        assert sum(map(len, replaced.values())) < 300_000

    def test_claims_and_releases_do_not_read_all_claims(self, broker, server):
        """What one of many that run costs does not grow with their number."""
        many, ran = 30, []
        broker.ask("first", **SHARED)
        for number in range(many):
            broker.park(f"t{number}", ttl=LONG, limit=1000)
        broker.end("first")
        while given := broker.given():
            ran += given
            for task in given:
                broker.claim(task, limit=1000)
        assert len(ran) == many == len(broker.records().running)
        for costs in (
            lambda: broker.end("t0", copy=2),
            lambda: broker.claim("t1", 3, limit=1000),
            lambda: broker.end("t2", copy=2, settles=5),
        ):
            costs()
            assert f"HGETALL {LOCK}:running" not in server.called()


class TestSweep:
    def test_a_line_that_is_swept_does_not_end_by_itself(self, broker, held, server):
        """Half a year behind one holder: it lives, and is listed, as long as somebody looks."""
        broker.park("a")
        for _ in range(26):
            server.advance(7 * DAY)
            broker.wait(owner_of("first"))
            broker.lines.sweep(list(broker.listed()))
        assert (broker.line(), list(broker.listed())) == (["a"], [LOCK])
        broker.end("first")
        assert broker.given()[-1:] == ["a"]

    def test_a_claim_whose_copy_never_came_is_forgotten(self, broker, held, server):
        """After seven days no broker delivers it any more; others that run stay."""
        broker.line_up("a", "b")
        broker.claim("a", ttl=10)
        server.advance(10)
        broker.sweep()
        server.advance(6 * DAY)
        broker.claim("b", ttl=10)
        server.advance(DAY)
        broker.sweep()
        assert broker.records().running == ["b"]

    def test_who_has_not_claimed_many_turns_is_told(self, broker, held, server):
        """From the fourth turn on: somebody finds out whether it still can be claimed."""
        broker.line_up("head")
        for turn in range(6):
            assert broker.swept()[2] == (["head"] if turn >= 3 else [])
            server.advance(TURN * 2**turn)

    @pytest.mark.parametrize("is_swept", [True, False])
    def test_a_claim_whose_last_release_was_lost_ends_by_itself(
        self, broker, held, server, is_swept
    ):
        """The sweep keeps it for two hours, in which a copy may come; without one it ends, too."""
        broker.line_up("a")
        broker.claim("a")
        broker.end("a", 2, settles=TURN)  # its result is on its way
        server.advance(TURN)
        assert broker.claim("a", 3) == "granted"  # its process died
        broker.end("a", 3, settles=TURN)
        server.advance(TURN + 2 * HOUR - 1)
        broker.sweep()
        assert broker.records().running == ["a"]
        server.advance(1 if is_swept else 7 * DAY)
        if is_swept:
            broker.sweep()
        server.end_keys()
        assert left(server) == set()


class TestMarks:
    """A task that is done has a mark, and nothing else is left."""

    def test_it_ends_after_two_hours(self, broker, held, server):
        """Until then a copy does not run; the list of lines is left for a month."""
        broker.line_up(*"ab")
        for task in "ab":
            broker.run(task)
        assert (left(server), broker.records().done) == (set(), {"a", "b"})
        server.advance(2 * HOUR - 1)
        assert broker.ask("a", copy=3) == "done"
        server.advance(1)
        server.end_keys()
        assert server.names() == {INDEX}
        server.advance(30 * DAY)
        server.end_keys()
        assert server.names() == set()

    @pytest.mark.parametrize(
        "ticket", ["done:1:0", "done:0:1", "DONE:0:0", "done:00:0", "done0:0:0"]
    )
    def test_what_is_no_copy_has_another_mark(self, broker, ticket):
        """A retry, a task replaced by itself, and one whose id differs in case are other work."""
        broker.claim("done", 1)
        broker.end("done")
        shown = Ticket(ticket, True)
        park = broker.lines.park
        assert Answer(park([LOCK], "other@w:1/1", LONG, "{}", shown)) == "granted"
        broker.end("other", ticket=ticket)
        assert Answer(park([LOCK], "other@w:1/2", LONG, "{}", shown)) == "done"
        assert broker.ask("done", copy=2) == "done"

    def test_a_claim_that_was_left_keeps_no_copy_from_running(self, broker, held, server):
        """Nobody has its lease: its reply was lost, or its process has died."""
        broker.line_up("a")
        assert broker.claim("a", ttl=TURN) == "granted"
        assert broker.leave("a", RUNS) is False
        server.advance(TURN + 1)
        assert broker.leave("a", ASIDE) is False
        assert broker.leave("a", RUNS) is True
        assert broker.claim("a", 3) == "done"


class TestRunningWithoutALock:
    """Its task takes no lock in the worker that has its turn."""

    @pytest.fixture
    def server(self):
        """The first reply to each request to leave a line is lost, so it is sent twice."""

        class Losing(LuaServer):
            def run(self, script, keys, *arguments):
                if script is scripts.LEAVE:
                    super().run(script, keys, *arguments)
                return super().run(script, keys, *arguments)

            def exchange(self, script, keys, *arguments):
                return self.run(script, keys, *arguments), True

        return Losing()

    def test_one_copy_runs(self, broker, held):
        """The request that took it out of line is answered the same again; another is not."""
        broker.park("a")
        assert broker.leave("a", RUNS) is True
        assert broker.leave("a", RUNS) is False

    def test_one_that_was_dropped_does_not_run(self, broker, held):
        """Its caller was told so."""
        broker.park("a")
        broker.lines.drop(LOCK, "a:0:0", '"replaced":"no"')
        assert broker.leave("a", RUNS) is False


class TestAnotherTaskOfTheSameId:
    """Who may write to one queue sends a task of his own under the id of another's."""

    def stored(self, task, name):
        """Make the bytes of a message whose headers name a task."""
        headers = {"id": task, "argsrepr": '{"task":"shop.spy"}'} | ({"task": name} if name else {})
        return Message("", "celery", headers, None, None, {}, True, b"body").to_bytes()

    def spy(self, broker):
        answer = broker.claim("a", 9, task="shop.spy")
        assert (answer, answer.holder, answer.place) == ("refused", {"id": "a", "parked": True}, 0)
        for how in (OVER, ENDED, RUNS, ASIDE):
            assert not broker.leave("a", how, "shop.spy")

    def test_it_neither_takes_it_out_of_line_nor_runs_in_its_place(self, broker, held, server):
        """In line and at its turn: the other one goes on."""
        broker.park("a", message=self.stored("a", "shop.pay"))
        before = snapshot(server)
        self.spy(broker)
        assert snapshot(server) == before
        broker.end("first")
        self.spy(broker)
        assert broker.claim("a", task="shop.pay") == "granted"

    @pytest.mark.parametrize("name", ["shop.pay", 'with "quotes"', "Ünï", "\\", ""])
    def test_its_own_message_is_its_own_whatever_its_name_is(self, broker, held, name):
        """Names are compared as the message writes them; one that is not known is any."""
        broker.park("b", message=self.stored("b", name))
        assert broker.leave("b", name)
        broker.park("c", message=self.stored("c", None))  # message protocol 1 has no such header
        assert broker.leave("c", name)


class TestBounds:
    @pytest.mark.parametrize("room", [{"most": 1}, {"most_bytes": 300}])
    def test_a_message_that_says_it_was_parked_needs_room_too(self, broker, held, room):
        """Its record may have been lost, or it is forged: it is told to come again."""
        message = {"message": b"m" * 200}
        broker.park("a", bounds=Bounds(**room), **message)
        assert broker.park("b", marked=True, bounds=Bounds(**room), **message) == "full"
        replacing = Bounds(**room, overflow="replace")
        parked = broker.park("b", marked=True, bounds=replacing, **message)
        assert (parked.replaced, broker.line()) == ({"a": b"m" * 200}, ["b"])

    @pytest.mark.parametrize(
        ("in_line", "comes", "stays"),
        [(2, 1, "a"), (1, 2, "b"), (1, 1, "b"), (None, 1, "b"), (1, None, "b")],
        ids=["older", "newer", "the same time", "not known in line", "not known"],
    )
    def test_the_one_that_was_sent_last_stays(self, broker, held, in_line, comes, stays):
        """Workers reach the lock in any order; who goes is told each time, and has not run."""
        messages = {"a": in_line, "b": comes}
        messages = {task: sent(at) if at else b"{}" for task, at in messages.items()}
        broker.park("a", message=messages["a"], bounds=REPLACES)
        (goes,) = {"a", "b"} - {stays}
        for _ in range(2):
            answer = broker.park("b", message=messages["b"], bounds=REPLACES)
            assert (answer, answer.place) == ("parked", 1)
            assert answer.replaced == {goes: messages[goes]}
            assert broker.line() == [stays]
        assert broker.leave(goes) is True
        assert broker.ask(goes, 2) == "done"

    @pytest.mark.parametrize("how", [RUNS, ASIDE])
    def test_one_that_has_lost_its_place_does_not_run(self, broker, held, how):
        """Its end is told otherwise; if nobody can read its message, that is kept for people."""
        for task in ("a", "b"):
            broker.park(task, bounds=REPLACES)
        assert broker.leave("a", how) is False
        assert broker.records().replaced == ["a"]
        assert broker.leave("a", UNREAD) is True
        assert (broker.records().replaced, list(broker.records().aside)) == ([], ["a"])

    @pytest.mark.parametrize(
        "written",
        [
            b'1 {"sent":0,"until":"","a":"{\\"sent\\":1"}\n',
            b'1 {"sent":0,"until":"","headers":{"sent":1}}\n[]',
            b'1 {"sent":0,"until":""}\n1 {"sent":1',
            b'{"sent":1}',
        ],
        ids=["in a text", "in a header", "in the body", "without a version"],
    )
    def test_the_time_of_sending_stands_first_and_nowhere_else(self, broker, held, written):
        """An argument that looks like it does not make its task the older one."""
        broker.park("a", message=sent(2), bounds=REPLACES)
        broker.park("b", message=written, bounds=REPLACES)
        assert broker.line() == ["b"]

    def test_those_who_wait_in_their_slot_do_not_make_room(self, broker, held):
        """Nor do they count: the oldest parked task does, from the middle of the line."""
        broker.wait("w1")
        broker.park("a")
        broker.wait("w2")
        broker.park("b", bounds=REPLACES)
        assert broker.line() == ["w1", "w2", "b"]

    def test_as_many_of_the_oldest_make_room_as_it_needs(self, broker, held):
        """A long message takes the place of several short ones, and of no more."""
        for task in "abcd":
            broker.park(task, message=b"m" * 150)
        room = Bounds(most_bytes=900, overflow="replace")
        assert set(broker.park("e", message=b"m" * 400, bounds=room).replaced) == {"a", "b"}
        assert broker.line() == ["c", "d", "e"]


AWKWARD_IDS = ["bytes", "x#", "order:7", "a%40b", "~a", "a@w:1/", "two\nlines", "Ünï", "\ud800"]
AWKWARD_IDS += ["x" * 100_000]


class TestAwkwardIds:
    """Task ids come from users, and from whoever can publish a message."""

    def ask(self, broker, task_id, copy=1, *, message=b"", marked=False):
        name = ticket_of_request(SimpleNamespace(id=task_id, retries=0, replaced_task_nesting=0))
        shown = Ticket(name, marked, message)
        owner = f"{execution_start(task_id, 'w', 1)}nonce.{copy}"
        holder = json.dumps({"id": shown_id(task_id)})
        return Answer(broker.lines.park([LOCK], owner, LONG, holder, shown)), owner, name

    @pytest.mark.parametrize("task_id", AWKWARD_IDS, ids=lambda one: ascii(one)[:12])
    def test_a_task_of_any_id_is_parked_and_runs(self, broker, held, task_id, server):
        """It waits with another, has its turn and ends; the other and the count of bytes stay."""
        broker.park("other")
        parked, *_ = self.ask(broker, task_id, message=b"m")
        assert (parked, parked.place) == ("parked", 2)
        broker.end("first")
        broker.claim("other")
        assert broker.given() == ["other"]
        broker.end("other", copy=2)
        (turn,) = broker.published
        granted, owner, name = self.ask(broker, task_id, 2, marked=True)
        assert (granted, turn.ticket, turn.message) == ("granted", name, b"m")
        assert broker.store.holders(LOCK)[0].id == shown_id(task_id)
        assert broker.store.release([LOCK], owner, broker.ending(name))
        assert self.ask(broker, task_id, 3, marked=True)[0] == "done"
        assert left(server) == set()

    @pytest.mark.parametrize("task_id", ["a@w:1/", "a@w:1/x", "~a", "a", "a:0"])
    def test_a_task_is_not_taken_for_another_of_which_it_has_the_beginning(self, broker, task_id):
        """The death of a task's process ends no other's lease, and no other's turn."""
        self.ask(broker, task_id)
        other = "b" if task_id == "a" else "a"
        assert self.ask(broker, other)[0].place == 1  # a copy of what runs would have no place
        assert broker.store.release_dead([LOCK], execution_start(other, "w", 1)) == 0
        assert broker.store.release_dead([LOCK], execution_start(task_id, "w", 1)) == 1

    def test_a_mark_of_a_success_is_no_mark_of_a_ticket(self, broker):
        """A task whose id looks like another's ticket cannot say that the other has run."""
        broker.store.remember(LOCK, "a:0:0", "done 0", 60)
        assert broker.ask("a") == "granted"


class TestDamage:
    """Somebody has written under one of a lock's names."""

    @pytest.fixture
    def broker(self, redis_url):
        broker = Line(real(redis_url))
        yield broker
        broker.store.close()

    @pytest.mark.parametrize(
        ("end", "kind"),
        [
            *(("", "hash"), (":line", "zset"), (":tickets", "hash")),
            *((":handed", "zset"), (":running", "hash")),
        ],
    )
    def test_a_key_of_another_type_is_named(self, broker, redis_client, end, kind):
        """The error says which key, what it is and what to do; other locks are as before."""
        broker.ask("first")
        redis_client.delete(LOCK + end)
        redis_client.set(LOCK + end, "by hand", ex=60)
        with pytest.raises(DamagedLockError, match="rename") as caught:
            broker.park("a")
        assert caught.value.lock == LOCK
        assert f"{LOCK + end!r} is a string, not a {kind}" in str(caught.value)
        assert broker.ask("a", lock=OTHER) == "granted"
        found = broker.lines.sweep([LOCK, OTHER])
        assert isinstance(found[LOCK], DamagedLockError)
        assert found[OTHER] == Swept(0, {})

    @pytest.mark.parametrize(
        "record",
        [
            *("by hand", "", "x 1 1 1 x {}", "1 9 9 x", "\0\n\xff" * 100),
            *(f"1 {'9' * 400} 1 1 x {{}}", f"1 {FAR} {'9' * 400} 1 x {{}}"),
            *(f"1 {FAR} 1 {'9' * 400} x {{}}", "1 100030000000000000 1 1 x {}"),
        ],
        ids=[
            *("by hand", "empty", "version", "short", "bytes"),
            *("end", "token", "since", "year 3170843"),
        ],
    )
    @BOTH
    def test_a_lease_that_cannot_be_read_is_told(self, broker, redis_client, record):
        """Nobody takes a lock of which nobody can tell whether it is held; the record is shown."""
        redis_client.hset(LOCK, "somebody", record)
        for ask in (broker.ask, broker.park, broker.wait, broker.clear):
            with pytest.raises(DamagedLockError, match="a lease in it cannot be read") as caught:
                ask("a")
            assert record.partition("\0")[0][:60] in str(caught.value)
            assert len(str(caught.value)) < 500
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
    @pytest.mark.parametrize("when", ["in line", "at its turn"])
    def test_a_record_that_cannot_be_read_is_kept_for_people(self, broker, held, server, when):
        """Who gives the turn is told of it by one without a message; the next has its turn."""
        broker.park("a")
        broker.park("b")
        if when == "in line":
            record = broker.spoil("a")
            broker.end("first")
        else:  # while its message was on its way
            broker.end("first")
            broker.given()
            record = broker.spoil("a")
            server.advance(TURN)
            broker.sweep()
        assert broker.published == [Turn(LOCK, "a:0:0", b""), turn_of("b")]
        assert broker.records().aside == {"a": record}
        assert broker.line() == []

    @pytest.mark.parametrize(
        "arrived",
        ["1", "null", "true", "{}", '"x"', '"1"' + ',"1"' * 20_000],
        ids=["number", "null", "boolean", "object", "word", "long"],
    )
    def test_one_whose_locks_cannot_be_read(self, broker, held, server, arrived):
        """Whatever stands in their place; the claim of such a task holds up no sweep."""
        for task in "ab":
            broker.park(task)
        stations = f'[["{LOCK}","x:1",{arrived}]]'.encode()
        record = broker.record_of("a").replace(b" x:1 ", b" %b " % stations)
        more = len(record) - len(broker.record_of("a"))
        server.send("HSET", f"{LOCK}:tickets", "a:0:0", record)
        server.send("HINCRBY", f"{LOCK}:tickets", "bytes", more)
        server.send("HSET", f"{LOCK}:running", "c:0:0", b"1 1 1 1 " + stations)
        server.send("PEXPIRE", f"{LOCK}:running", 1_000_000)
        broker.end("first")
        assert broker.records().aside == ({} if arrived[:2] == '"1' else {"a": record})
        broker.sweep()

    def test_one_that_is_to_make_room(self, broker, held):
        """It makes room, and nobody is told of an end that cannot be told."""
        broker.park("a")
        broker.spoil("a")
        assert broker.park("b", bounds=REPLACES).replaced == {}
        assert (broker.line(), list(broker.records().aside)) == (["b"], ["a"])

    @pytest.mark.parametrize("turn", [True, False], ids=["has its turn", "waits"])
    def test_one_whose_message_comes(self, broker, held, turn):
        """A copy of it raises nothing that would send it round for ever."""
        broker.park("a")
        if turn:
            broker.end("first")
        broker.spoil("a")
        broker.ask("a", copy=2)
        broker.end("first")
        assert broker.ask("a", copy=3) in {"granted", "refused", "done"}

    def test_a_request_that_comes_late_takes_no_turn(self, broker, held):
        """The task would be known as one that runs, for a week, and could not be put back."""
        broker.park("a")
        assert broker.leave("a", ASIDE) is True
        broker.end("first")
        broker.park("a")
        assert broker.claim("a") == "done"
        assert (broker.owners(), broker.records().running) == ([], [])
        assert broker.lines.put_back(LOCK, "a:0:0") == ""
        assert broker.given() == ["a"]

    def test_who_is_not_there_is_not_set_aside(self, broker, held, server):
        """An unknown ticket, and the name of the byte counter, change nothing."""
        broker.park("head")
        before = snapshot(server)
        for ticket in ("other:0:0", "bytes", ""):
            assert broker.lines.leave(LOCK, ticket, ASIDE) == NOT_THERE
        assert snapshot(server) == before


class Apart(LuaServer):
    """As a cluster: the index of lines may be on another node than a lock; keeps all requests."""

    def __init__(self):
        super().__init__()
        self.requests = []

    def together(self, keys):
        return [[key] for key in keys]

    def run(self, *request):
        self.requests.append(request)
        return super().run(*request)


class TestIndex:
    """The index of the lines that a sweep visits."""

    @pytest.fixture
    def look(self, broker, server):
        """Sweep all lines, as a worker does; whoever is told later has seen them before."""

        def look(late=0):
            found = broker.listed()
            swept = broker.lines.sweep(list(found))
            server.advance(late)
            for lock, number in found.items():
                if not swept[lock].parked:
                    broker.lines.delist(lock, number)
            return set(broker.listed())

        return look

    @pytest.fixture(params=[LuaServer, Apart])
    def server(self, request):
        return request.param()

    def test_one_that_is_replaced_at_once_is_listed(self, broker, held, look, server):
        """It was sent before the oldest, and its end is not reported yet."""
        broker.park("a", message=sent(2), bounds=REPLACES)
        server.send("DEL", INDEX)
        assert "b" in broker.park("b", message=sent(1), bounds=REPLACES).replaced
        assert look() == {LOCK}

    def test_who_strikes_off_late_has_looked_when_nobody_could_come_any_more(
        self, broker, held, look, server
    ):
        """It read the list and found the line empty; then its request was held back."""
        broker.lines.enlist(LOCK)
        server.advance(1)
        assert look(late=3600) == {LOCK}

    def test_a_request_that_comes_late_leaves_no_line_that_nobody_sweeps(
        self, broker, held, look, server
    ):
        """It lists its line, or puts nothing in it if that is listed on another node."""
        broker.park("a")
        broker.leave("a")
        server.advance(60)
        assert look() == set()
        server.send("DEL", f"{LOCK}:done:a:0:0")  # a failover has lost that it is done
        if isinstance(server, Apart):
            for request in [one for one in server.requests if one[0] is scripts.PARK]:
                server.run(*request)
        else:
            broker.park("a")
        assert look() == (set() if isinstance(server, Apart) else {LOCK})
        assert (broker.swept()[0] > 0) == (LOCK in look())

    def test_one_that_takes_long_to_park_lists_its_line_again(self, monkeypatch):
        """A sweep has found the line empty meanwhile, and has struck it off."""
        server, times = Apart(), count()
        broker = Line(server)
        broker.ask("first")
        enlist = broker.lines.enlist

        def slowly(lock):
            enlist(lock)
            server.advance(0 if next(times) else 31)

        monkeypatch.setattr(broker.lines, "enlist", slowly)
        assert broker.park("a") == "parked"
        assert next(times) >= 2

    def test_no_number_comes_again(self, broker, server):
        """Who read one before the line was struck off strikes nothing off afterwards."""
        numbers = []
        for _ in range(2):
            broker.lines.enlist(LOCK)
            server.advance(60)
            numbers.append(broker.listed()[LOCK])
            broker.lines.delist(LOCK, numbers[0])
        assert int(numbers[0]) < int(numbers[1])
        assert list(broker.listed()) == [LOCK]
        server.advance(-3600)  # as a failover may set the clock
        broker.lines.enlist(LOCK)
        assert int(server.send("HGET", INDEX, LOCK)) > int(numbers[1])


DAMAGE = {
    "a lease": ("HSET", LOCK, "x", "?"),
    "the limit": ("SET", f"{LOCK}:limit", "?", "PX", "1000000"),
    "the count of bytes": ("HSET", f"{LOCK}:tickets", "bytes", "?"),
    "a large count of bytes": ("HSET", f"{LOCK}:tickets", "bytes", "9" * 20),
    **{
        end: ("SET", f"{LOCK}:{end}", "?", "PX", "1000000")
        for end in ("line", "places", "tickets", "handed", "running", "replaced", "aside", "newest")
    },
}
CALLS = {
    "park": lambda broker: broker.park("new"),
    "claim": lambda broker: broker.claim("a"),
    "leave": lambda broker: broker.leave("b"),
    "set aside": lambda broker: broker.leave("b", ASIDE),
    "drop": lambda broker: broker.lines.drop(LOCK, "b:0:0", '"why":""'),
    "limit": lambda broker: broker.store.override(LOCK, ttl=60, limit=5),
    "free": lambda broker: broker.store.free(LOCK, "ran@w:1/1", broker.token),
    "give back": lambda broker: broker.give_back("a"),
    "keep": lambda broker: broker.lines._server.run(scripts.KEEP_TURN, [LOCK], "a:0:0"),
    "sweep": lambda broker: broker.sweep(),
    "release_dead": lambda broker: broker.store.release_dead([OTHER, LOCK], "ran@w:1/"),
    "wait": lambda broker: broker.wait("w@w:1/1", 60),
    "wait for several": lambda broker: broker.store.acquire(
        [OTHER, LOCK], "w@w:1/1", TURN, "{}", place=60
    ),
}


def is_of_no_concern(damage, call):
    """A limit takes a damaged one's place, and who waits in its slot reads no parked tasks."""
    parked = ("count of bytes", "tickets", "running", "replaced", "aside", "newest")
    return (call, damage) == ("limit", "the limit") or (
        call.startswith("wait") and damage.endswith(parked)
    )


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("damage", DAMAGE)
def test_what_meets_damage_has_changed_nothing(server, damage, call):
    """An error that comes after half of the work would leave the other half undone for ever."""
    broker = Line(server)
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
