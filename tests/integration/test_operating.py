"""What people do to locks on a real server: free one lease, drop one parked task, look at lines."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from celery import Celery

from celery_dislock import Dislock, SingletonTask
from celery_dislock.exceptions import LockLostError
from celery_dislock.messages.headers import REPLACED_HEADER
from celery_dislock.messages.message import Message
from celery_dislock.parking.store import Lines, Ticket
from celery_dislock.servers.overview import Overview, find_parked
from celery_dislock.servers.replies import Done, Granted, Parked, Refused
from celery_dislock.servers.requests import Ending
from celery_dislock.servers.store import Store
from celery_dislock.tasks.actions import Actions
from tests.holding import name_of

if TYPE_CHECKING:
    from collections.abc import Iterator

LOCK = name_of("operated")
LONG = 1000.0  # seconds: no such lease runs out by itself


class Worker:
    """What a worker has: the store of leases, the lines, and what it was given to publish."""

    def __init__(self, url, home="here"):
        self.published = []
        self.told = []
        self.store = Store(url, home=home, hand_over=self.published.extend)
        self.lines = Lines(self.store.lock_server, "dislock", home, self.published.extend)
        self.overview = Overview(self.store.lock_server, "dislock")
        self.actions = Actions(None, self)

    def end_reservation(self, request):
        assert "dislock_unique" not in request.headers

    def tell_replaced(self, lock, replaced):
        self.told.append((lock, replaced))

    def take(self, owner, **terms):
        return self.store.acquire([LOCK], owner, LONG, json.dumps({"id": owner}), **terms)

    def token(self, owner, **terms):
        return self.take(owner, **terms).tokens[0]

    def park(self, task, copy=1, *, message=None, marked=False, **terms):
        message = message_of(task) if message is None else message
        ticket = Ticket(f"{task}:0:0", f"{task}@", marked, message, **terms)
        self.lines.enlist(LOCK)
        return self.lines.park(LOCK, f"{task}@w/{copy}", LONG, "{}", ticket)

    def claim(self, task, copy=2):
        return self.park(task, copy, message=b"", marked=True)

    def given(self):
        """Tell, once, which parked tasks have their turn."""
        tasks = [turn.ticket.partition(":")[0] for turn in self.published]
        self.published.clear()
        return tasks

    def state(self):
        return self.overview.lock(LOCK)

    def owners(self):
        return [holder.owner for holder in self.state().holders]

    def free(self, owner=None):
        (shown,) = [one for one in self.state().holders if owner in {None, one.owner}]
        return self.actions.free(LOCK, shown.owner, shown.token)

    def drop(self, task):
        return self.actions.drop(LOCK, f"{task}:0:0")


def message_of(task, /, **headers):
    about = {"task": "shop.export", "id": task, "argsrepr": "(7,)", "kwargsrepr": "{}", **headers}
    return Message("", "celery", about, "application/json", "utf-8", {}, True, b"[]").to_bytes()


def unique(app, key, **options):
    """Make a task of which one message of a key waits at a time."""

    @app.task(
        base=SingletonTask,
        name="shop.unique",
        lock_key=key,
        lock_unique_until="end",
        shared=False,
        **options,
    )
    def task(corp): ...

    return task


@pytest.fixture
def worker(redis_url) -> Iterator[Worker]:
    worker = Worker(redis_url)
    yield worker
    worker.store.close()


@pytest.fixture
def other(redis_url) -> Iterator[Worker]:
    """A worker of another broker."""
    worker = Worker(redis_url, home="there")
    yield worker
    worker.store.close()


class TestFreeing:
    def test_the_lease_that_was_shown_ends(self, worker, redis_client):
        """A lease is freed by its owner and its token; nothing is left."""
        token = worker.token("a")
        for other in (token - 1, token + 1):  # another lease of the same owner
            assert worker.actions.free(LOCK, "a", other) is False
        assert worker.actions.free(LOCK, "a", token) is True
        assert worker.actions.free(LOCK, "a", token) is False
        assert redis_client.keys("*") == []

    def test_a_parked_task_has_its_turn(self, worker):
        """Its message is published by whoever frees the lock, and the lock is reserved for it."""
        worker.take("a")
        worker.park("p")
        worker.park("q")
        assert worker.free() is True
        assert worker.given() == ["p"]
        assert worker.owners() == ["p:0:0#"]
        assert isinstance(worker.claim("p"), Granted)

    def test_a_parked_task_of_another_broker_stays_first(self, worker, other):
        """Its message cannot be published from here; a sweep of its own worker does that."""
        worker.take("a")
        other.park("p")
        assert worker.free() is True
        assert worker.given() == []
        assert isinstance(worker.take("b"), Refused)
        other.lines.sweep([LOCK])
        assert other.given() == ["p"]

    def test_a_lease_that_only_runs_out_is_freed(self, worker, redis_client):
        """``lock_at_least_for`` holds a lock for longer than its task runs."""
        worker.take("a")
        worker.store.release([LOCK], "a", Ending(at_least=LONG))
        assert worker.state().holders[0].expiring
        assert worker.free() is True
        assert redis_client.keys("*") == []

    def test_the_turn_of_a_parked_task_goes_to_the_next(self, worker):
        """A task whose message does not come is put at the end of the line, and is not lost."""
        worker.take("a")
        worker.park("p")
        worker.park("q")
        worker.store.release([LOCK], "a")
        assert worker.given() == ["p"]
        assert worker.free("p:0:0#") is True
        assert worker.given() == ["q"]
        assert [place.ticket for place in worker.state().line] == ["p:0:0"]
        assert isinstance(worker.claim("p"), Parked)  # its message came after all
        assert isinstance(worker.claim("q"), Granted)
        worker.store.release([LOCK], "q@w/2", Ending(ticket="q:0:0"))
        assert worker.given() == ["p"]

    def test_a_parked_task_that_runs_ends_as_ever(self, worker, redis_client):
        """Its lease was freed while its body ran: its release ends its ticket."""
        worker.take("a")
        worker.park("p")
        worker.store.release([LOCK], "a")
        worker.claim("p")
        assert worker.free() is True
        assert worker.store.release([LOCK], "p@w/2", Ending(ticket="p:0:0")) is False
        assert isinstance(worker.claim("p", copy=3), Done)
        assert not redis_client.exists(f"{LOCK}:running", f"{LOCK}:tickets")


class TestDropping:
    def test_it_leaves_the_line_and_its_end_is_told(self, worker):
        """The others move up; the caller gets the message, with the reason in its headers."""
        worker.take("a")
        for task in "pqr":
            worker.park(task)
        assert worker.drop("q") is True
        assert [place.ticket for place in worker.state().line] == ["p:0:0", "r:0:0"]
        ((lock, replaced),) = worker.told
        assert lock == LOCK
        message = Message.from_bytes(replaced["q:0:0"])
        reason = message.headers.pop(REPLACED_HEADER)
        assert reason == "dropped by an operator from the line for lock 'operated'"
        assert message == Message.from_bytes(message_of("q"))

    def test_a_late_copy_of_its_message_does_not_run(self, worker):
        """A redelivery, or the message of its turn, finds that the work is done."""
        worker.take("a")
        worker.park("p")
        worker.drop("p")
        worker.store.release([LOCK], "a")
        assert isinstance(worker.park("p", 2), Done)
        assert isinstance(worker.claim("p", 3), Done)

    def test_its_turn_goes_to_the_next(self, worker):
        """The lock was reserved for it: the next in line gets it at once."""
        worker.take("a")
        worker.park("p")
        worker.park("q")
        worker.store.release([LOCK], "a")
        worker.given()
        assert worker.drop("p") is True
        assert worker.given() == ["q"]
        assert isinstance(worker.claim("p"), Done)

    def test_what_runs_is_not_dropped(self, worker):
        """Its ticket was claimed: the body runs, and goes on."""
        worker.take("a")
        worker.park("p")
        worker.store.release([LOCK], "a")
        worker.claim("p")
        assert worker.drop("p") is False
        assert worker.drop("never there") is False
        assert worker.actions.drop(LOCK, "bytes") is False  # a field beside the tickets
        assert worker.owners() == ["p@w/2"]

    def test_a_task_of_another_broker_is_told_by_its_worker(self, worker, other):
        """A sweep of its own worker has the message, with the reason."""
        worker.take("a")
        other.park("p")
        assert worker.drop("p") is True
        assert worker.told == []
        swept = other.lines.sweep([LOCK])[LOCK]
        message = Message.from_bytes(swept.replaced["p:0:0"])
        assert message.headers[REPLACED_HEADER].startswith("dropped by an operator")

    @pytest.mark.parametrize("record", [b"nonsense", b"1 2 3", b"2 1 1 1 x 1 here m"])
    def test_a_record_that_nobody_can_read_is_set_aside(self, worker, redis_client, record):
        """It has no message that could be told; a person can look at it."""
        worker.take("a")
        worker.park("p")
        redis_client.hset(f"{LOCK}:tickets", "p:0:0", record)
        assert worker.drop("p") is True
        assert worker.told == []
        assert redis_client.hget(f"{LOCK}:aside", "p:0:0") == record.decode()

    @pytest.mark.parametrize(
        "headers", [{}, {"note": ',"headers":{"a":1}'}, {"%1": "%0"}, {"dislock_sent": 5}]
    )
    def test_the_reason_is_put_into_the_headers_and_nowhere_else(self, worker, headers):
        """Whatever text is in a message, only the member of that name is changed."""
        worker.take("a")
        worker.park("p", message=message_of("p", **headers))
        worker.drop("p")
        message = Message.from_bytes(worker.told[0][1]["p:0:0"])
        message.headers.pop(REPLACED_HEADER)
        assert message == Message.from_bytes(message_of("p", **headers))


class TestLines:
    def test_a_parked_task_is_found_by_ticket_and_by_id(self, worker, monkeypatch):
        """Wherever in a long line it stands, or with its turn."""
        monkeypatch.setattr("celery_dislock.servers.overview.SEARCHED", 3)
        worker.take("a")
        for number in range(8):
            worker.park(f"t{number}")
        worker.store.release([LOCK], "a")
        for number in (0, 1, 4, 7):
            for wanted in (f"t{number}", f"t{number}:0:0"):
                (place,) = find_parked(worker.overview, LOCK, wanted)
                assert place.id == f"t{number}"
        assert find_parked(worker.overview, LOCK, "t") == []


@pytest.fixture
def app(redis_url):
    app = Celery("shop", broker=redis_url, backend="cache+memory://", set_as_current=False)
    Dislock(app)
    yield app
    app.close()


class TestLockFor:
    def test_several_keys_are_one_handle_of_several(self, app):
        """It stands for all of them; each can be asked for."""

        @app.task(base=SingletonTask, name="shop.move", lock_key=["b:<a>", "a:<a>"], shared=False)
        def move(a): ...

        handle = move.lock_for(7)
        assert (handle.key, handle.keys, len(handle)) == ("a:7 + b:7", ("a:7", "b:7"), 2)
        assert [one.key for one in handle] == ["a:7", "b:7"]
        with Dislock(app) as dislock:
            lock = dislock.lock(["a:7", "b:7"])
            lease = lock.try_acquire()
            assert [holder.owner for holder in handle.holders()] == [lease.owner] * 2
            assert len(handle.free()) == 2
            assert handle.holders() == []
            with pytest.raises(LockLostError):
                lock.extend()
            assert lease.lost

    def test_a_reservation_is_freed_by_hand(self, app):
        """After a purge, say: the next message is sent.  What was reserved since is left alone."""
        export = unique(app, "export:<corp>")
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
