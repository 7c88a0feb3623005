"""What people do to locks: free a lease, drop a parked task, pause a lock, change its limit."""

import json
from types import SimpleNamespace

import pytest
from celery import Celery
from click.testing import CliRunner
from lupa.lua51 import LuaError

from celery_dislock import SingletonTask
from celery_dislock.config.terms import Rate, Terms
from celery_dislock.messages.headers import REPLACED
from celery_dislock.messages.message import Message
from celery_dislock.operating.cli import dislock
from celery_dislock.parking.store import Lines
from celery_dislock.servers.overview import Overview
from celery_dislock.servers.records import Conflict
from celery_dislock.servers.replies import Granted, Handed
from celery_dislock.servers.store import Store
from celery_dislock.tasks.actions import Actions
from tests.holding import all_locks, name_of
from tests.integration.parked import LOCK, LONG, REPLACES, Answer, Line, sent
from tests.integration.servers import several
from tests.unit.deliveries import noted


class Worker(Line):
    """What a worker has, what it was told, and what an operator sees and does."""

    def __init__(self, server, broker="here"):
        super().__init__(server, broker)
        self.told = []
        self.overview = Overview(server, "dislock")
        self.actions = Actions(None, self)
        self.publisher = self

    def tell_replaced(self, lock, replaced):
        self.told.append((lock, replaced))

    def take(self, owner, **terms):
        return Answer(self.store.acquire([LOCK], owner, LONG, json.dumps({"id": owner}), **terms))

    def release(self, owner):
        return self.store.release([LOCK], owner)

    def line_up(self, *tasks):
        """Let tasks wait for "a", and end its lease: the first of them has its turn."""
        self.take("a")
        for task in tasks:
            self.park(task, message=message_of(task))
        self.release("a")

    def free(self, owner=None):
        holders = self.overview.lock(LOCK).holders
        (shown,) = [one for one in holders if owner in {None, one.owner}]
        return self.actions.free(LOCK, shown.owner, shown.token)

    def drop(self, task):
        return self.actions.drop(LOCK, f"{task}:0:0")


def message_of(task, /, **headers):
    about = {"task": "shop.export", "id": task, **noted(store="0" * 16), **headers}
    return Message("", "celery", about, "application/json", "utf-8", {}, True, b"[]").to_bytes()


@pytest.fixture
def worker(server):
    return Worker(server)


@pytest.fixture
def other(server):
    """A worker of another broker."""
    return Worker(server, broker="there")


class TestFreeing:
    def test_a_parked_task_of_another_broker_stays_first(self, worker, other):
        """Its message cannot be published from here; a sweep of its own worker does that."""
        worker.take("a")
        other.park("p")
        assert worker.free() is True
        assert worker.given() == []
        assert worker.take("b") == "refused"
        other.sweep()
        assert other.given() == ["p"]

    def test_the_turn_of_a_parked_task_goes_to_the_next(self, worker):
        """A task whose message does not come is put at the end of the line, and is not lost."""
        worker.line_up("p", "q")
        assert worker.given() == ["p"]
        assert worker.free("p:0:0#") is True
        assert (worker.given(), worker.line()) == (["q"], ["p"])
        assert worker.park("p", 2, marked=True) == "parked"  # its message came after all
        assert worker.claim("q") == "granted"
        worker.end("q", 2)
        assert worker.given() == ["p"]


class TestDropping:
    def test_it_leaves_the_line_and_its_end_is_told(self, worker):
        """The others move up; the caller gets the message, with the reason in its headers."""
        worker.take("a")
        for task in "pqr":
            worker.park(task, message=message_of(task))
        assert worker.drop("q") is True
        assert worker.line() == ["p", "r"]
        ((lock, replaced),) = worker.told
        assert lock == LOCK
        message = Message.from_bytes(replaced["q:0:0"])
        reason = message.headers["dislock"].pop(REPLACED)
        assert reason == "dropped by an operator from the line for lock 'line'"
        assert message == Message.from_bytes(message_of("q"))
        # A redelivery, or the message of its turn, finds that the work is done.
        assert (worker.park("q", 2), worker.claim("q", 3)) == ("done", "done")

    def test_its_turn_goes_to_the_next(self, worker):
        """The lock was reserved for it: the next in line gets it at once."""
        worker.line_up("p", "q")
        worker.given()
        assert worker.drop("p") is True
        assert worker.given() == ["q"]

    def test_what_runs_is_not_dropped(self, worker):
        """Its ticket was claimed: the body runs, and goes on."""
        worker.line_up("p")
        worker.claim("p")
        for ticket in ("p:0:0", "never there", "bytes"):  # the last is a field beside the tickets
            assert worker.actions.drop(LOCK, ticket) is False
        assert [one.owner for one in worker.overview.lock(LOCK).holders] == ["p@w:1/2"]

    def test_a_task_of_another_broker_is_told_by_its_worker(self, worker, other):
        """A sweep of its own worker has the message, with the reason."""
        worker.take("a")
        other.park("p", message=message_of("p"))
        assert worker.drop("p") is True
        assert worker.told == []
        message = Message.from_bytes(other.sweep().replaced["p:0:0"])
        assert message.headers["dislock"][REPLACED].startswith("dropped by an operator")

    @pytest.mark.parametrize("record", [b"nonsense", b"1 2 3", b"1 1 1 1 here 9 x:1 m"])
    def test_a_record_that_nobody_can_read_is_set_aside(self, worker, server, record):
        """It has no message that could be told; a person can look at it."""
        worker.take("a")
        worker.park("p")
        server.send("HSET", f"{LOCK}:tickets", "p:0:0", record)
        assert worker.drop("p") is True
        assert worker.told == []
        assert server.send("HGET", f"{LOCK}:aside", "p:0:0") == record

    @pytest.mark.parametrize(
        "headers",
        [
            *({}, {"%1": "%0"}, noted(sent=5, store="%1"), {"x": noted(sent=5)}),
            {"note": ',"headers":{"dislock":{"v":1,'},
        ],
    )
    def test_the_reason_is_put_into_our_header_and_nowhere_else(self, worker, headers):
        """Whatever text is in a message, only the member of that name is changed."""
        worker.take("a")
        worker.park("p", message=message_of("p", **headers))
        worker.drop("p")
        message = Message.from_bytes(worker.told[0][1]["p:0:0"])
        message.headers["dislock"].pop(REPLACED)
        assert message == Message.from_bytes(message_of("p", **headers))


def test_a_reservation_is_freed_by_hand(redis_url):
    """After a purge, say: the next message is sent.  What was reserved since is left alone."""
    with Celery("shop", broker=redis_url, backend="cache+memory://", set_as_current=False) as app:

        @app.task(base=SingletonTask, lock_key="<n>", lock_unique_until="end", shared=False)
        def export(n): ...

        handle = export.lock_for(7)
        first = export.delay(7)
        assert export.delay(7).duplicate
        (shown,) = handle.free()
        assert (shown.id, shown.state) == (first.id, "waiting")
        later = export.delay(7)
        assert not later.duplicate
        assert handle.free(shown) == []
        assert [one.id for one in handle.free()] == [later.id]
        assert handle.free() == []


UNREAD = ("2 0 0", "3 later 1 1 0 ", "2 rate 0/9 1 0 ", "2 limit 5 1 0 \n2 limit x 1 0 ")


class TestPause:
    def test_who_has_the_lock_keeps_it(self, worker):
        """It renews, asks again and releases as ever."""
        worker.take("a")
        worker.store.override(LOCK, limit=0)
        assert worker.take("a") == "granted"
        assert worker.store.renew([([LOCK], "a", LONG)]) == [True]
        assert worker.release("a")

    @pytest.mark.parametrize("waiters", [1, 2, 3])
    def test_who_waits_is_not_handed_the_lock_until_it_goes_on(self, worker, waiters):
        """A release hands it to nobody; the end of the pause hands it to the first."""
        worker.take("a")
        for nth in range(waiters):
            worker.take(f"w{nth}", place=LONG)
        worker.store.override(LOCK, limit=0)
        worker.release("a")
        assert worker.overview.lock(LOCK).holders == []
        assert worker.overview.lock(LOCK).waiting == waiters
        assert worker.actions.limit(LOCK, None) == 0
        assert isinstance(worker.store.wait(LOCK, "w0", 1.0), Handed)
        assert worker.overview.lock(LOCK).waiting == waiters - 1

    def test_it_ends_at_its_time_if_it_was_set_for_one(self, worker, server):
        """Who asks then is admitted; a parked task has its turn before, with the rest as delay."""
        worker.actions.limit(LOCK, 0, seconds=60)
        worker.park("t")
        server.advance(44)
        assert worker.lines.sweep([LOCK])[LOCK].parked == 1
        assert worker.published == []
        server.advance(2)
        worker.sweep()
        assert [turn.delay for turn in worker.published] == [pytest.approx(14.0)]
        server.advance(14)
        assert worker.claim("t") == "granted"

    def test_a_line_behind_one_that_ends_is_not_stuck(self, worker, server):
        """Neither at the moment of its end, nor before; people see until when, and why."""
        worker.actions.limit(LOCK, 0, seconds=60, note="by ana")
        for task in "tu":
            worker.park(task)
        for second in range(60):
            state = worker.overview.lock(LOCK)
            assert (state.rate.held_back, state.rate.back_note) == (60 - second, "by ana")
            assert not state.is_stuck
            server.advance(1)
            worker.sweep()
        assert worker.given() == ["t"]
        assert not worker.overview.lock(LOCK).is_stuck
        assert worker.claim("t") == "granted"

    @pytest.mark.parametrize(("before", "then"), [(0, None), (3, 3), (None, None)])
    def test_one_that_ends_leaves_a_limit_and_a_rate(self, worker, server, before, then):
        """It takes the place of a pause without an end alone, and they hold after it."""
        worker.actions.limit(LOCK, before)
        worker.actions.rate(LOCK, Rate(5, 60.0))
        worker.actions.limit(LOCK, 0, seconds=60)
        state = worker.overview.lock(LOCK)
        assert (state.limit, state.rate.held_back, str(state.rate.rate)) == (then, 60, "5 a minute")
        assert worker.take("a") == "refused"
        server.advance(60)
        assert worker.take("a") == "granted"

    def test_each_has_its_own_end(self, worker, server):
        """A limit that has ended holds no more, though a rate without an end keeps the record."""
        terms = (Terms(limit=2),)
        worker.actions.limit(LOCK, 1, seconds=60)
        worker.actions.rate(LOCK, Rate(9, 1.0))
        assert worker.take("a", terms=terms) == "granted"
        assert worker.take("b", terms=terms) == "refused"
        server.advance(60)
        assert worker.take("b", terms=terms) == "granted"
        state = worker.overview.lock(LOCK)
        assert (state.limit, str(state.rate.rate)) == (None, "9 a second")

    @pytest.mark.parametrize("seconds", [0, 1])
    def test_one_with_an_end_stays_when_a_task_holds_the_lock_back_for_less(
        self, worker, server, seconds
    ):
        """A short answer 429, or one that is over, does not end what an operator has paused."""
        worker.actions.limit(LOCK, 0, seconds=60, note="by ana")
        worker.actions.hold_back(LOCK, seconds, note="429")
        for passes, left, note in ((0, 60, "by ana"), (2, 58, "by ana"), (60, 40, "429")):
            server.advance(passes)
            rate = worker.overview.lock(LOCK).rate
            assert (rate.held_back, rate.back_note) == (left, note)
            assert worker.take("a") == "refused"
            if passes == 2:
                worker.actions.hold_back(LOCK, 100, note="429")

    def test_what_a_release_before_has_written_holds(self, worker, server):
        """A record of the first version has a limit alone; what is set beside it leaves it."""
        server.send("SET", f"{LOCK}:limit", f"1 0 {server.now_ms} by\nana")
        assert worker.overview.lock(LOCK).limit_note == "by ana"
        assert worker.take("a") == "refused"
        worker.actions.hold_back(LOCK, 5)
        server.advance(6)
        assert worker.take("a") == "refused"
        assert worker.actions.limit(LOCK, None) == 0
        assert worker.take("a") == "granted"

    @pytest.mark.parametrize("seconds", [None, 60])
    def test_nobody_is_told_to_end_for_a_newer_one(self, worker, seconds):
        """The newest could not run: until the pause ends, what runs is left alone."""
        assert worker.ask("old", bounds=REPLACES, sent=1) == "granted"
        worker.actions.limit(LOCK, 0, seconds=seconds)
        answer = worker.park("new", message=sent(2), bounds=REPLACES, sent=2)
        assert (answer, answer.told) == ("parked", ())

    def test_one_that_ends_is_ended_at_once(self, worker):
        """`resume` gives those in line their turns."""
        worker.actions.limit(LOCK, 0, seconds=3600)
        worker.park("t")
        worker.actions.rate(LOCK, None)
        assert worker.given() == ["t"]
        assert worker.claim("t") == "granted"

    @pytest.mark.parametrize(
        ("seconds", "answer"), [(9, "refused"), (60, "parked"), (None, "parked")]
    )
    def test_a_turn_that_was_given_before_is_not_claimed(self, worker, server, seconds, answer):
        """It is kept if the pause ends soon, and else the task is back at its place in line."""
        worker.line_up("t")
        assert worker.given() == ["t"]
        worker.actions.limit(LOCK, 0, seconds=seconds)
        assert worker.claim("t") == answer
        if seconds is None:
            worker.store.override(LOCK, limit=None)
        else:
            server.advance(seconds)
            worker.sweep()
        assert worker.given() == ([] if answer == "refused" else ["t"])
        assert worker.claim("t", 3) == "granted"

    def test_a_limit_that_cannot_be_read_admits_nobody(self, worker, server):
        """A later version may have written it: the lock is damaged, and says so."""
        commands = [("SET", f"{LOCK}:limit", record) for record in UNREAD]
        for command in (*commands, ("RPUSH", f"{LOCK}:limit", "x")):
            server.lose()
            server.send(*command)
            with pytest.raises(LuaError):
                worker.take("a")
            worker.actions.hold_back(LOCK, 0)
            assert worker.take("a") == "granted"


class TestLimit:
    def test_it_overrides_the_codes(self, worker):
        """In both directions, for each acquisition from now on."""
        worker.take("a")
        worker.store.override(LOCK, limit=2)
        assert worker.take("b") == "granted"
        assert worker.take("c", terms=(Terms(limit=9),)) == "refused"
        assert worker.actions.limit(LOCK, 1) == 2
        worker.release("a")
        assert worker.take("c", terms=(Terms(limit=9),)) == "refused"
        worker.store.override(LOCK, limit=None)
        assert worker.take("c", terms=(Terms(limit=9),)) == "granted"

    def test_those_in_line_are_admitted_at_once(self, worker):
        """As many as the new limit admits: waiters are woken, parked tasks are published."""
        worker.take("a")
        worker.take("w", place=LONG)
        for task in "tu":
            worker.park(task)
        worker.store.override(LOCK, limit=3)
        assert isinstance(worker.store.wait(LOCK, "w", 1.0), Handed)
        assert worker.given() == ["t"]

    def test_a_copy_of_a_task_that_runs_is_refused(self, worker):
        """It was delivered again, and would run twice: the number is for different tasks."""
        worker.store.override(LOCK, limit=3)
        worker.take("t@w:1/1")
        worker.take("u@w:1/1")
        for terms in ({}, {"place": LONG}):
            answer = worker.take("t@w:2/9", **terms)
            assert (answer, answer.holder) == ("refused", {"id": "t@w:1/1"})
        assert worker.overview.lock(LOCK).waiting == 0
        assert worker.take("t@w:1/1") == "granted"
        assert worker.take("tt@w:1/1") == "granted"

    @pytest.mark.parametrize("place", [0.0, LONG])
    def test_each_of_several_locks_has_its_own(self, worker, place):
        """Three tenants' tasks at a time, one call of the API."""
        limits = {name_of("api"): Terms(limit=2), name_of("tenant"): Terms(limit=3)}

        def take(owner, *locks, **how):
            terms = tuple(limits[lock] for lock in locks)
            return worker.store.acquire(locks, owner, LONG, "{}", terms=terms, **how)

        both = [take(f"a{nth}", *limits, place=place) for nth in range(3)]
        assert [*map(type, both)] == [Granted, Granted, Conflict]
        assert both[2].key == "api"
        assert [type(take(owner, name_of("tenant"))) for owner in "cd"] == [Granted, Conflict]


class TestRate:
    """What people set; how a rate is kept is tested in test_rates.py."""

    HOUR = 3600

    def start(self, worker, *tasks, rate="1/30s"):
        """Take the lock once, so that these tasks are too early."""
        rated = {"limit": 9, "rate": Rate.of(rate)}
        worker.take("a", terms=(Terms(**rated),))
        worker.release("a")
        for task in tasks:
            worker.park(task, **rated)

    def rate(self, worker):
        return worker.overview.lock(LOCK).rate

    def test_a_line_that_waits_for_the_time_is_never_stuck(self, worker, server):
        """Nobody holds the lock, and nothing is wrong with it, from one start to the next."""
        self.start(worker, *"pqr")
        due, ran, seen = {}, [], set()
        for second in range(1, 100):
            server.advance(1)
            if second % 10 == 0:
                worker.sweep()
            for turn in worker.published:
                due[turn.ticket[0]] = second + turn.delay
            worker.published.clear()
            for task in [task for task, at in due.items() if at <= second]:
                del due[task]
                assert worker.claim(task) == "granted"
                worker.end(task, 2)
                ran.append(task)
            state = worker.overview.lock(LOCK)
            seen.add((bool(state.waiting), bool(state.holders), bool(state.rate.early)))
            assert not state.is_stuck
        assert ran == list("pqr")
        assert (True, False, True) in seen  # that would be stuck but for the time

    def test_those_in_line_may_start_at_once_at_a_rate_that_admits_them(self, worker):
        """As soon as it is set, and again when the code's holds that does not."""
        self.start(worker, *"pq")
        assert worker.actions.rate(LOCK, Rate(2, 30.0), note="by ana") is None
        assert worker.given() == ["p"]
        assert self.rate(worker).note == "by ana"
        assert str(worker.actions.rate(LOCK, None)) == "2 in 30 s"
        assert not self.rate(worker).is_set

    @pytest.mark.parametrize("back", [60, 9000])
    def test_a_rate_that_was_set_for_a_time_ends_although_it_was_held_back(
        self, worker, server, back
    ):
        """A task holds the lock back: who set the rate, since when and until when is kept."""
        worker.actions.rate(LOCK, Rate(5, 60.0), seconds=2 * self.HOUR, note="by ana")
        since = self.rate(worker).since
        worker.actions.hold_back(LOCK, back, note="429")
        assert self.rate(worker).back_note == "429"
        server.advance(60)
        found = self.rate(worker)
        assert (found.since, found.note) == (since, "by ana")
        assert found.remaining == pytest.approx(7140, abs=0.1)
        worker.actions.hold_back(LOCK, 0, note="429 is over")
        assert (self.rate(worker).is_set, self.rate(worker).held_back) == (True, 0.0)
        server.advance(7141)
        assert self.rate(worker) is None

    def test_a_hold_back_outlasts_a_rate_that_was_set_for_less(self, worker, server):
        """Nobody may start before its end because of a rate."""
        worker.actions.hold_back(LOCK, 60)
        worker.actions.rate(LOCK, Rate(5, 60.0), seconds=30)
        server.advance(31)
        assert self.rate(worker).held_back == pytest.approx(29, abs=0.1)
        server.advance(30)
        assert self.rate(worker) is None


@pytest.fixture
def quorum(redis_program, tmp_path):
    """Three independent servers, one of which is away when a pause is set."""
    with several(3, tmp_path) as servers:
        store = Store([server.url for server in servers])
        lines = Lines(store.lock_server, "dislock", "", lambda _turns: None)
        process = SimpleNamespace(lines=lines, store=store)
        yield store, Actions(None, process), servers
        store.close()


class TestActions:
    def test_locks_are_listed_while_one_of_several_servers_hangs(self, quorum):
        """To connect to it leaves time for the others; whichever of them it is."""
        _, actions, servers = quorum
        actions.limit(LOCK, 0)
        for server in servers:
            app = Celery("shop", broker="memory://", set_as_current=False)
            app.conf.dislock_url = [one.url for one in servers]
            server.pause()
            listed = CliRunner().invoke(dislock, ["ls"], obj=SimpleNamespace(app=app))
            server.resume()
            assert listed.exit_code == 0, listed.output
            assert "paused" in listed.output

    def test_a_pause_that_one_server_missed_is_shown_until_it_is_repeated(self, quorum):
        """One that has it alone, too: else it decides when another of them is away."""
        store, actions, servers = quorum
        overview = Overview(store.lock_server, "dislock")

        def shown_without(*missing):
            for server in missing:
                with server.client() as client:
                    client.delete(f"{LOCK}:limit")
            return [(one.limit, one.limit_differs, one.exists) for one in all_locks(overview)]

        actions.limit(LOCK, 0)
        for server, left in zip(servers, [[(0, 1, True)], [(None, 1, True)], []], strict=True):
            assert shown_without(server) == left
        actions.limit(LOCK, 0)
        shown_without(*servers[:2])
        assert actions.limit(LOCK, None) == 0
        assert shown_without() == []

    def test_a_pause_holds_on_several_servers(self, quorum):
        """It needs a majority, as an acquisition does; a server that was away changes nothing."""
        store, actions, servers = quorum
        servers[0].stop()
        actions.limit(LOCK, 0, note="by ana")
        servers[0].start()
        assert isinstance(store.acquire([LOCK], "a", LONG, "{}"), Conflict)
        assert Overview(store.lock_server, "dislock").lock(LOCK).limit_note == "by ana"
        assert actions.limit(LOCK, None) == 0
        assert isinstance(store.acquire([LOCK], "a", LONG, "{}"), Granted)
        actions.limit(LOCK, 0, seconds=60)  # each server ends it by its own clock
        state = Overview(store.lock_server, "dislock").lock(LOCK)
        assert (state.is_paused, 0 < state.limit_remaining <= 60) == (True, True)
        assert isinstance(store.acquire([LOCK], "b", LONG, "{}"), Conflict)
