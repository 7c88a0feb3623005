"""What becomes of a parked task's message that no guard will see, in a worker's main process."""

import json
import logging

import pytest
import redis
from celery import Task
from celery.exceptions import InvalidTaskError, NotRegistered
from kombu.message import Message

from celery_dislock import scripts
from celery_dislock.worker.arrivals import ArrivalStep
from tests.declaring import declare, never
from tests.driven import held, new_app, reservation
from tests.unit.deliveries import deliver, noted

BODY = [[], {}, {}]
WAYS = ["on_decode_error", "on_unknown_message", "on_invalid_task", "on_unknown_task"]


class Consumer:
    """
    Stands for a worker's consumer.

    Attributes:
        dropped: What it was told to drop, by which method.
        made: Tasks that strategies have made.
    """

    connection_errors = ()

    def __init__(self, app):
        self.app, self.strategies, self.dropped, self.made = app, {}, [], []

    def update_strategies(self):
        for name in self.app.tasks:
            self.strategies[name] = lambda *_, name=name: self.made.append(name)

    def on_decode_error(self, message, exc):
        self.dropped.append("on_decode_error")

    def on_unknown_message(self, body, message):
        self.dropped.append("on_unknown_message")

    def on_invalid_task(self, body, message, exc):
        self.dropped.append("on_invalid_task")

    def on_unknown_task(self, body, message, exc):
        self.dropped.append("on_unknown_task")
        if message.headers:
            self.app.backend.mark_as_failure(message.headers["id"], NotRegistered("t"))


@pytest.fixture
def consumer(app):
    declare(app, never, name="locks", lock_on_conflict="queue")
    declare(app, name="plain", base=Task, lock_key=None)
    unique = {"lock_limit": None, "lock_unique_until": "start"}
    declare(app, never, name="unlocked", lock_on_conflict="skip", **unique)
    app.finalize()
    consumer = Consumer(app)
    ArrivalStep(consumer)
    consumer.update_strategies()
    return consumer


@pytest.fixture
def turn_of(broker):
    """Park a task, and return the header of its turn; its worker's code is older."""

    def turn_of(name):
        older = new_app("older")
        task = declare(older, never, name=name, lock_on_conflict="queue")
        with held(older):
            deliver(task, "2")
        return {"dislock": broker.last.notes}

    return turn_of


@pytest.fixture
def turn(consumer, turn_of):
    """The header of the message of a turn."""
    return turn_of("locks")


class Came(Message):
    """A message that notes how it ended."""

    ended = ""

    def ack_log_error(self, *_):
        self.ended = "acknowledged"


def message(headers, task="locks", body=BODY, **properties):
    return Came(
        body=body if isinstance(body, str) else json.dumps(body),
        content_type="application/json",
        content_encoding="utf-8",
        headers=headers and {"id": "2", "task": task, "retries": 0, **headers},
        properties={"correlation_id": "2", **properties},
        delivery_info={},
        accept={"application/json"},
    )


def drop(consumer, name, message):
    error = InvalidTaskError("damaged")
    arguments = {
        "on_decode_error": (message, error),
        "on_unknown_message": (None, message),
        "on_invalid_task": (None, message, error),
        "on_unknown_task": (None, message, KeyError("locks")),
    }
    getattr(consumer, name)(*arguments[name])


def arrive(consumer, message, body=None):
    consumer.strategies[message.headers["task"]](message, body, None, None, [])


@pytest.mark.parametrize("way", WAYS)
def test_what_is_dropped_leaves_its_line(app, lock_server, consumer, turn, caplog, way):
    """Celery drops it as ever; its task is set aside, and its result is FAILURE."""
    for _ in range(2):  # the second is a copy: it is not in line
        drop(consumer, way, message(turn))
    assert consumer.dropped == [way] * 2
    assert lock_server.locks() == []
    assert app.tasks["locks"].lock_for().state()[0].aside == 1
    assert app.backend.get_state("2") == "FAILURE"
    assert way != "on_invalid_task" or "damaged" in str(app.backend.get_result("2"))
    assert "no task of that name" not in str(app.backend.get_result("2"))  # Celery's own is kept
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert record.message.startswith(
        "Parked task locks[2:0:0] for lock 'k' cannot be run, and is set aside in dislock:{k}:aside"
    )


def test_its_caller_is_told_of_its_end(app, consumer, turn, monkeypatch):
    """With ``rpc://`` its result is sent to the queue that the message names."""
    told = []
    monkeypatch.setattr(
        app.backend,
        "store_result",
        lambda *_, request, **__: told.append((request.reply_to, request.correlation_id)),
    )
    drop(consumer, "on_invalid_task", message(turn, reply_to="caller"))
    assert told == [("caller", "2")]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("note", ["2:1:0", "1:0:0", "garbage", "none", "no headers"])
def test_what_was_not_parked_is_dropped_and_no_more(lock_server, consumer, turn, way, note):
    """A header that names another task's ticket, or none, takes nobody out of line."""
    headers = noted(ticket=["dislock:{k}", note] if ":" in note else note)
    headers = {"none": {}, "no headers": None}.get(note, headers)
    drop(consumer, way, message(headers))
    assert consumer.dropped == [way]
    assert lock_server.locks() == ["k"]


@pytest.mark.parametrize("way", WAYS)
def test_what_is_dropped_frees_its_key(app, consumer, broker, monkeypatch, way):
    """Before its result can be seen: a message that no worker can run has ended."""
    task = declare(app, lock_unique_until="end", lock_key="sent")
    task.apply_async(task_id="2")
    seen = []
    monkeypatch.setattr(
        app.backend, "store_result", lambda *_, **__: seen.append(reservation(task))
    )
    drop(consumer, way, message({"dislock": broker.last.notes}))
    assert set(seen) <= {None}
    assert reservation(task) is None


def test_servers_that_are_away_do_not_disturb_the_consumer(
    app, lock_server, consumer, turn, caplog, monkeypatch
):
    """The log says what is missing, without the password that redis-py writes into its errors."""

    def away(*_, **__):
        raise redis.ConnectionError("Connection(username='me', password='hunter2') failed")

    monkeypatch.setattr(app.backend, "mark_as_failure", away)
    lock_server.away = True
    drop(consumer, "on_invalid_task", message(turn, "plain"))
    arrive(consumer, message(turn, "plain"))  # it takes no lock, so it needs no server
    assert consumer.made == ["plain"]
    for told in (
        "Task plain[2] cannot be run, and its result does not say so: ",
        "Parked task plain[2:0:0] for lock 'k' cannot be run, and stays in line",
        "Task plain[2] runs without a lock, and stays in line",
    ):
        assert told in caplog.text
    assert "hunter2" not in caplog.text


def test_a_task_that_locks_goes_on_to_its_guard(lock_server, consumer, turn):
    """Parked or not: nobody is asked here.  Strategies are made anew with each connection."""
    asked = lock_server.requests
    consumer.update_strategies()
    for headers in (turn, {}):
        arrive(consumer, message(headers or noted()))
    assert consumer.made == ["locks"] * 2
    assert lock_server.requests == asked


@pytest.mark.parametrize(
    "body",
    [None, 5, "text", [], [1], [[], {}], [5, {}, {}], [[], 5, {}], [[], {}, 5], {"a": 1, "b": 2}],
)
def test_a_body_of_no_tasks_shape_makes_no_task(consumer, turn, body):
    """Celery's worker would end with it, be started again, be given it again, and so on."""
    with pytest.raises(InvalidTaskError, match="damaged"):
        arrive(consumer, message(turn, body=json.dumps(body)))
    assert consumer.made == []


@pytest.mark.parametrize("body", [BODY, [["a"], {}, None], {"args": [], "task": "locks"}])
def test_a_body_of_a_tasks_shape_goes_on(consumer, turn, body):
    """Those of both of Celery's protocols."""
    arrive(consumer, message(turn, body=body))
    assert consumer.made == ["locks"]


def test_a_lost_reply_makes_no_copy_of_it(lock_server, consumer, turn_of, monkeypatch):
    """The command is sent again, and finds what the first one did."""
    turn = turn_of("plain")
    run = lock_server.run
    monkeypatch.setattr(lock_server, "exchange", lambda *call: (run(*call), run(*call), True)[1:])
    arrive(consumer, message(turn, "plain"))
    assert consumer.made == ["plain"]


@pytest.mark.parametrize("name", ["plain", "unlocked", "locks"])
def test_a_task_that_takes_no_lock_leaves_its_line_and_runs(
    app, lock_server, consumer, turn_of, caplog, name
):
    """Once: another copy of it is acknowledged unrun.  With --no-dislock no task takes one."""
    caplog.set_level("INFO", "celery_dislock")
    app.conf.dislock_enabled = False if name == "locks" else None
    turn = turn_of(name)
    first, second = (message(turn, name, delivery_tag=tag) for tag in ("one", "two"))
    for came in (first, second):
        arrive(consumer, came)
    assert consumer.made == [name]
    assert (first.ended, second.ended) == ("", "acknowledged")
    assert f"Task {name}[2] runs without a lock: it was parked for lock" in caplog.text
    assert f"Task {name}[2] acknowledged unrun: another copy" in caplog.text
    assert lock_server.locks() == []


@pytest.mark.parametrize("released", [False, True])
def test_what_has_claimed_its_turn_and_got_no_reply_runs(lock_server, consumer, broker, released):
    """Its earlier delivery was put off; now it comes to a worker where it takes no lock."""
    older = new_app("older")
    task = declare(older, never, name="plain", lock_on_conflict="queue")
    with held(older):
        deliver(task, "2")
    turn = {"dislock": broker.last.notes}
    lock_server.fail_once(scripts.PARK, done=True)
    deliver(task, "2", headers=turn)
    lock_server.advance(5 * released)  # then its process has given the lock back
    assert lock_server.locks() == ([] if released else ["k"])
    first, second = message({"dislock": broker.last.notes}, "plain"), message(turn, "plain")
    for came in (first, second):
        arrive(consumer, came)
    assert (consumer.made, lock_server.locks()) == (["plain"], [])
    assert (first.ended, second.ended) == ("", "acknowledged")


@pytest.mark.parametrize("lost", [False, True])
def test_a_delivery_that_comes_again_runs(lock_server, consumer, turn, lost):
    """Its worker has died after it took it out of line, and the broker says that it comes again."""
    if lost:  # by a failover, with its record: nothing says that it is done
        lock_server.lose()
    for again in (False, True):
        came = message(turn, "plain")
        came.delivery_info["redelivered"] = again
        arrive(consumer, came)
    assert consumer.made == ["plain"] * 2
