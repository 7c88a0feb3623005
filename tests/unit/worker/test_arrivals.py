"""What becomes of a parked task's message that no guard will see, in a worker's main process."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest
import redis
from celery.exceptions import InvalidTaskError, NotRegistered
from kombu.message import Message

from celery_dislock import SingletonTask
from celery_dislock.parking.process import runtime_of
from celery_dislock.worker.arrivals import ArrivalStep
from tests.unit.deliveries import noted
from tests.unit.fakes import FakeLines, FakeRecord

LOCK = "dislock:{k}"
TURN = noted(ticket=[LOCK, "2:0:0"])
BODY = [[], {}, {}]


class Postman:
    """Stands for what publishes parked tasks."""

    def hand_over(self, lines, turns):
        raise AssertionError


class Consumer:
    """
    Stands for a worker's consumer.

    Attributes:
        dropped: What it was told to drop, by which method.
        made: Tasks that strategies have made.
    """

    connection_errors = ()

    def __init__(self, app):
        self.app = app
        self.strategies = {}
        self.dropped = []
        self.made = []

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
def lines(app, world):
    process = runtime_of(app).process
    process._publisher = Postman()
    process.lines = FakeLines(world.store)
    process.lines.parked[LOCK, "2:0:0"] = b"message"
    return process.lines


@pytest.fixture
def consumer(app):
    @app.task(name="locks", base=SingletonTask, lock_key="k", shared=False)
    def locks(): ...

    @app.task(name="plain", shared=False)
    def plain(): ...

    app.finalize()
    consumer = Consumer(app)
    ArrivalStep(consumer)
    consumer.update_strategies()
    return consumer


class Came(Message):
    """A message that notes how it ended."""

    ended = ""

    def ack_log_error(self, *_):
        self.ended = "acknowledged"


def message(task="locks", body=BODY, headers=TURN, **properties):
    about = {"id": "2", "task": task, "retries": 0, **headers}
    return Came(
        body=body if isinstance(body, str) else json.dumps(body),
        content_type="application/json",
        content_encoding="utf-8",
        headers=about,
        properties={"correlation_id": "2", **properties},
        delivery_info={},
        accept={"application/json"},
    )


def drop(consumer, name, message, error):
    arguments = {
        "on_decode_error": (message, error),
        "on_unknown_message": (None, message),
        "on_invalid_task": (None, message, error),
        "on_unknown_task": (None, message, KeyError("locks")),
    }
    getattr(consumer, name)(*arguments[name])


WAYS = ["on_decode_error", "on_unknown_message", "on_invalid_task", "on_unknown_task"]


@pytest.mark.parametrize("way", WAYS)
def test_what_is_dropped_leaves_its_line(app, world, lines, consumer, caplog, way):
    """Celery drops it as ever; its task is set aside, and its result is FAILURE."""
    drop(consumer, way, message(), InvalidTaskError("damaged"))
    assert consumer.dropped == [way]
    assert world.store.asked("withdraw") == [(LOCK, "2:0:0", "")]
    assert app.backend.get_state("2") == "FAILURE"
    assert way != "on_invalid_task" or "damaged" in str(app.backend.get_result("2"))
    assert "no task of that name" not in str(app.backend.get_result("2"))  # Celery's own is kept
    drop(consumer, way, message(), InvalidTaskError("damaged"))  # a copy: it is not in line
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert record.message.startswith(
        f"Parked task locks[2:0:0] for lock 'k' cannot be run, and is set aside in {LOCK}:aside: "
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        noted(ticket=[LOCK, "2:1:0"]),
        noted(ticket="garbage"),
        {**noted(ticket=[LOCK, "1:0:0"]), "headers": "garbage", "timelimit": 5},
        None,
    ],
)
def test_what_was_not_parked_is_dropped_and_no_more(world, lines, consumer, way, headers):
    """A header that names another task's ticket, or none, takes nobody out of line."""
    came = message(headers=headers or {})
    if headers is None:
        came.headers = None
    drop(consumer, way, came, InvalidTaskError("damaged"))
    assert consumer.dropped == [way]
    assert world.store.calls == []


@pytest.mark.parametrize("way", WAYS)
def test_what_is_dropped_frees_its_key(world, consumer, way):
    """Before its result can be seen: a message that no worker can run has ended."""
    there = world.store.reservations
    there.records[LOCK] = FakeRecord("ab", "waiting", "2", number=3, ends=2000.0)
    header = noted(unique=[LOCK, "end", "ab", 3])
    freed = []
    consumer.dropped = SimpleNamespace(append=lambda _way: freed.append(there.of(LOCK) is None))
    drop(consumer, way, message(headers=header), KeyError("locks"))
    assert freed == [True]


def test_servers_that_are_away_do_not_disturb_the_consumer(
    app, world, lines, consumer, caplog, monkeypatch
):
    """The log says what is missing, without the password that redis-py writes into its errors."""

    def away(*_, **__):
        raise redis.ConnectionError("Connection(username='me', password='hunter2') failed")

    monkeypatch.setattr(app.backend, "mark_as_failure", away)
    world.store.away = True
    drop(consumer, "on_invalid_task", message("plain"), InvalidTaskError("damaged"))
    assert "Task plain[2] cannot be run, and its result does not say so: " in caplog.text
    assert "Parked task plain[2:0:0] for lock 'k' cannot be run, and stays in line" in caplog.text
    assert "hunter2" not in caplog.text


def arrive(consumer, message, body=None):
    consumer.strategies[message.headers["task"]](message, body, None, None, [])


def test_a_task_that_locks_goes_on_to_its_guard(world, lines, consumer):
    """Parked or not: nobody is asked here."""
    for headers in (TURN, {}):
        arrive(consumer, message(headers=headers))
    assert consumer.made == ["locks"] * 2
    assert world.store.calls == []


@pytest.mark.parametrize(
    "body",
    [None, 5, "text", [], [1], [[], {}], [5, {}, {}], [[], 5, {}], [[], {}, 5], {"a": 1, "b": 2}],
)
def test_a_body_of_no_tasks_shape_makes_no_task(lines, consumer, body):
    """Celery's worker would end with it, be started again, be given it again, and so on."""
    with pytest.raises(InvalidTaskError, match="damaged"):
        arrive(consumer, message(body=json.dumps(body)))
    assert consumer.made == []


@pytest.mark.parametrize("body", [BODY, [["a"], {}, None], {"args": [], "task": "locks"}])
def test_a_body_of_a_tasks_shape_goes_on(lines, consumer, body):
    """Those of both of Celery's protocols."""
    arrive(consumer, message(body=body))
    assert consumer.made == ["locks"]


def test_a_task_that_takes_no_lock_leaves_its_line_and_runs(world, lines, consumer, caplog):
    """Once: another copy of it is acknowledged unrun."""
    caplog.set_level("INFO", "celery_dislock")
    first, second = (message("plain", delivery_tag=tag) for tag in ("one", "two"))
    for came in (first, second):
        arrive(consumer, came)
    assert consumer.made == ["plain"]
    assert (first.ended, second.ended) == ("", "acknowledged")
    assert "Task plain[2] runs without a lock: it was parked for lock dislock:{k}" in caplog.text
    assert "Task plain[2] acknowledged unrun: another copy" in caplog.text


def test_a_delivery_that_comes_again_runs(lines, consumer):
    """Its worker has died: by its name, or where the broker says that it comes again."""
    lines.parked.clear()  # a failover has lost its record: nothing says that it is done
    for tag in ("one", "one", 7):
        again = message("plain", delivery_tag=tag)
        again.delivery_info["redelivered"] = tag == 7
        arrive(consumer, again)
    assert consumer.made == ["plain"] * 3


def test_without_locks_every_task_takes_none(app, world, lines, consumer):
    """--no-dislock: what was parked leaves its line, and runs."""
    app.conf.dislock_enabled = False
    arrive(consumer, message("locks"))
    assert consumer.made == ["locks"]
    assert lines.parked == {}


def test_a_task_that_takes_no_lock_runs_while_the_lock_server_is_away(
    world, lines, consumer, caplog
):
    """It takes no lock, so it needs no server; that it may run again is said."""
    world.store.away = True
    arrive(consumer, message("plain"))
    assert consumer.made == ["plain"]
    assert "Task plain[2] runs without a lock, and stays in line" in caplog.text


def test_strategies_are_looked_at_each_time_they_are_made(lines, consumer):
    """A consumer that connects again makes them anew, and each is asked once."""
    consumer.update_strategies()
    arrive(consumer, message())
    assert consumer.made == ["locks"]
