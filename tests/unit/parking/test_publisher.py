"""Publishing parked tasks whose turn it is, and ending those that lost their place."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
from celery.exceptions import TaskRevokedError
from kombu.exceptions import OperationalError

from celery_dislock.messages.headers import HEADER, notes_in
from celery_dislock.messages.message import Message
from celery_dislock.parking.publisher import Publisher
from celery_dislock.servers.replies import Turn
from tests.unit.deliveries import Producer, noted
from tests.unit.fakes import FakeLines

LOCK = "dislock:{k}"
REASON = "a newer task took its place in line for lock 'k'"


@pytest.fixture
def lines(world):
    return FakeLines(world.store)


class Failing(Producer):
    """Takes some messages, and then raises what it has to."""

    most = 0

    def publish(self, body, **options):
        error, self.away = self.away, None if len(self.sent) < self.most else self.away
        super().publish(body, **options)
        self.away = error


@pytest.fixture
def producer(app, monkeypatch):
    producer = Failing()
    monkeypatch.setattr(app, "producer_or_acquire", producer.acquired)
    return producer


@pytest.fixture
def postman(app, producer):
    return Publisher(app)


def parked(task_id, task="t", alone=True, **headers):
    headers = {"id": task_id, "task": task, **headers}
    body = task_id.encode()
    about = {"content_type": "application/json", "content_encoding": "utf-8", "properties": {}}
    return Message("e", "r", headers, **about, alone=alone, body=body).to_bytes()


def turn(task_id, message=None):
    return Turn(LOCK, f"{task_id}:0:0", parked(task_id) if message is None else message)


# Whose turn it is


def test_each_is_published_with_its_ticket(postman, producer, lines):
    """In order, to where it came from; the header tells its lock and its ticket."""
    postman.hand_over(lines, [turn("1"), turn("2")])
    assert [body for body, _ in producer.sent] == [b"1", b"2"]
    [_, (_, options)] = producer.sent
    assert options["headers"] == {"id": "2", "task": "t", **noted(ticket=[LOCK, "2:0:0"])}
    assert (options["exchange"], options["routing_key"]) == ("e", "r")
    assert lines.store.calls == []


def test_a_message_of_celerys_first_protocol_keeps_its_ticket(postman, producer, lines):
    """Its body has the id: the headers do not say whose it is."""
    message = replace(Message.from_bytes(parked("a@b")), headers={}).to_bytes()
    postman.hand_over(lines, [turn("a@b", message)])
    [(_, options)] = producer.sent
    assert options["headers"] == noted(ticket=[LOCK, "a@b:0:0"])


@pytest.mark.parametrize("error", [OperationalError("refused"), OSError("refused")])
def test_a_broker_that_is_away_does_not_disturb_who_releases(
    postman, producer, lines, caplog, error
):
    """What was not sent is given back: else a long outage made each turn a long one."""
    producer.away = error
    producer.most = 1
    postman.hand_over(lines, [turn("1"), turn("2"), turn("3")])
    assert [body for body, _ in producer.sent] == [b"1"]
    assert lines.store.calls == [("give_back", LOCK, "2:0:0"), ("give_back", LOCK, "3:0:0")]
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    named = "t[2] for lock 'k', t[3] for lock 'k'"
    assert f"will be sent again by the next sweep: {named}: refused" in record.message


def test_a_message_that_the_broker_refuses_holds_up_nobody(
    postman, producer, lines, monkeypatch, caplog
):
    """What its client cannot send is reported by itself, and the others are published."""
    publish = producer.publish

    def refusing(body, **options):
        if body == b"1":
            raise TypeError("no such header")
        publish(body, **options)

    monkeypatch.setattr(producer, "publish", refusing)
    postman.hand_over(lines, [turn("1"), turn("2")])
    assert [body for body, _ in producer.sent] == [b"2"]
    [record] = caplog.records
    assert "their turn has run out: t[1] for lock 'k': no such header" in record.message


def test_damaged_messages_are_set_aside_and_the_others_are_published(
    postman, producer, lines, caplog
):
    """They are kept for people to see; setting one aside frees its turn for the next."""
    lines.next_turns = [[turn("3", b"rubbish"), turn("4")], [turn("5")]]
    postman.hand_over(lines, [turn("1"), turn("2", b"rubbish")])
    assert [body for body, _ in producer.sent] == [b"1", b"4", b"5"]
    asides = [(LOCK, "2:0:0", b"rubbish"), (LOCK, "3:0:0", b"rubbish")]
    assert lines.store.asked("set_aside") == asides
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2
    assert f"cannot be run, and is set aside in {LOCK}:aside: it begins" in caplog.text


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (b"", "for lock 'k' cannot be run, and is set aside in dislock:{k}:aside: the record of"),
        (None, "cannot be run: its message is gone from the lock server"),
    ],
    ids=["set aside by the script", "gone"],
)
def test_a_record_that_is_not_there_is_only_reported(postman, lines, caplog, message, words):
    """The script has given its turn on."""
    postman.hand_over(lines, [Turn(LOCK, "1:0:0", message)])
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert f"Parked task 1:0:0 {words}" in record.message
    assert lines.store.calls == []


def test_a_lock_server_that_is_away_loses_nothing(app, task, postman, producer, lines, caplog):
    """Whoever released has done its own task all the same, and what can be done is done."""
    lines.store.away = True
    postman.hand_over(lines, [turn("1", b"rubbish"), turn("2")])
    assert "stays in line until the lock server answers" in caplog.messages[0]
    assert [body for body, _ in producer.sent] == [b"2"]
    tell_replaced(postman, lines, {"3:0:0": parked("3")})
    assert result(app, "3")[0] == "REVOKED"
    assert "will say so when the sweep has tried again" in caplog.messages[1]
    producer.away = OperationalError("refused")
    postman.hand_over(lines, [turn("4")])
    assert "when their turns have run out, as the lock server is away" in caplog.messages[2]


# Who lost its place


@pytest.fixture
def task(app):
    @app.task(name="t")
    def task(): ...

    app.finalize()
    return task


def tell_replaced(postman, lines, replaced, end_reservation=lambda _request: None):
    return postman.tell_replaced(lines, LOCK, replaced, end_reservation)


def result(app, task_id="1"):
    found = app.AsyncResult(task_id)
    return found.state, found.result


@pytest.mark.parametrize("why", [REASON, "dropped by an operator"])
def test_a_task_that_is_alone_ends_as_revoked(app, task, postman, producer, lines, caplog, why):
    """Its result says why, as if it had been skipped; who takes it off the list logs it."""
    caplog.set_level("INFO", "celery_dislock")
    left = []
    lines.leave = lambda *told: left.append((*told, result(app)[0])) or len(left) == 1
    message = parked("1", **({} if why == REASON else noted(replaced=why)))
    assert tell_replaced(postman, lines, {"1:0:0": message}) == {"1": why}
    state, error = result(app)
    assert (state, type(error), str(error)) == ("REVOKED", TaskRevokedError, why)
    assert tell_replaced(postman, lines, {"1:0:0": message}) == {}
    assert left == [(LOCK, "1:0:0", "REVOKED")] * 2
    assert producer.sent == []
    assert caplog.text.count(f"Task t[1] skipped: {why}. It does not run.") == 1


def test_its_reservation_ends_after_its_result_is_stored(app, task, postman, lines):
    """Its key is free then; that of a task which a worker ends is freed there."""
    ended = []

    def end_reservation(request):
        header = vars(request)[HEADER]["unique"]
        ended.append((request.id, header, result(app)[0], lines.store.asked("leave")))

    header = [LOCK, "end", "ab", 3]
    told = {
        "1:0:0": parked("1", **noted(unique=header)),
        "2:0:0": parked("2", alone=False, **noted(unique=header)),
    }
    tell_replaced(postman, lines, told, end_reservation)
    assert ended == [("1", header, "REVOKED", [])]


@pytest.mark.parametrize(
    "about",
    [
        {"alone": False},
        {"task": "unknown"},
        {"alone": False, **noted(replaced="dropped by an operator")},
    ],
)
def test_one_that_others_wait_for_is_ended_by_a_worker(app, task, postman, producer, lines, about):
    """Only who knows the task can read its body, and with it the chord and the chain to be told."""
    lines.parked[LOCK, "1:0:0"] = b""
    assert tell_replaced(postman, lines, {"1:0:0": parked("1", **about)}) == {}  # told there
    [(body, options)] = producer.sent
    assert body == b"1"
    assert options["headers"]["task"] == about.get("task", "t")
    assert notes_in(options["headers"])["replaced"] == notes_in(about).get("replaced", REASON)
    assert result(app)[0] == "PENDING"
    assert lines.store.asked("leave") == [(LOCK, "1:0:0")]


def test_one_that_could_not_be_told_is_told_again(app, task, postman, producer, lines, caplog):
    """It leaves only after it was told, and keeps no other from it, nor does a damaged one."""
    producer.away = OperationalError("refused")
    replaced = {"1:0:0": parked("1", alone=False), "2:0:0": parked("2"), "3:0:0": b"rubbish"}
    tell_replaced(postman, lines, replaced)
    assert lines.store.asked("leave") == [(LOCK, "2:0:0")]
    assert lines.store.asked("set_aside") == [(LOCK, "3:0:0", b"rubbish")]
    assert result(app, "2")[0] == "REVOKED"
    assert (
        "Task t[1] lost its place in line for lock 'k'; its result will say so when" in caplog.text
    )


# Which broker


def home(url="redis://h:6379/0", transport=None, write_url=None):
    conf = {"broker_url": url, "broker_write_url": write_url or url}
    return Publisher(
        SimpleNamespace(conf=SimpleNamespace(**conf, broker_transport_options=transport))
    ).home


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("redis://h:6379/0", "redis://me:secret@h:6379/0"),
        ("redis://:a@h:6379/0", "redis://:b@h:6379/0"),
        ("amqp://h/shop", "amqp://guest:guest@h/shop"),
        ("amqp://H/shop", "amqp://h/shop"),
        ("redis://h:6379/0", "redis://h:6379/0?ssl_cert_reqs=none"),
        ("sentinel://:a@h:1;sentinel://:a@g:1", ["sentinel://h:1", "sentinel://g:1"]),
    ],
)
def test_two_logins_of_one_broker_are_one_home(one, other):
    """Who logs in, and how, says nothing about where the messages are."""
    assert home(one) == home(other, {"visibility_timeout": 60})
    assert set(home(one)) <= set("0123456789abcdef")
    assert len(home(one)) == 12


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"url": "redis://h:6379/1"}),
        ({}, {"url": "redis://h:6380/0"}),
        ({}, {"url": "redis://g:6379/0"}),
        ({}, {"url": "amqp://h:6379/0"}),
        ({}, {"url": "redis://h:6379/0;redis://g:6379/0"}),
        ({"url": "amqp://h/shop"}, {"url": "amqp://h/staging"}),
        ({}, {"write_url": "redis://writer:6379/0"}),
        ({"transport": {"global_keyprefix": "a"}}, {"transport": {"global_keyprefix": "b"}}),
        ({}, {"transport": {"queue_name_prefix": "staging-"}}),
        *(
            ({"transport": {option: "a"}}, {"transport": {option: "b"}})
            for option in ("data_folder_out", "control_folder", "master_name", "region")
        ),
        (
            {"url": "redis+socket:///r.sock?virtual_host=1"},
            {"url": "redis+socket:///r.sock?virtual_host=2"},
        ),
    ],
)
def test_two_places_are_two_homes(one, other):
    """Host, database, virtual host, prefix, folder: a task goes back to where it came from."""
    assert home(**one) != home(**other)


# Who does not claim


@pytest.mark.parametrize("state", ["SUCCESS", "FAILURE", "REVOKED"])
def test_who_has_ended_without_its_turn_is_set_aside(app, postman, lines, caplog, state):
    """A worker that knows nothing of lines has run or dropped it: its queue is served."""
    lines.parked[LOCK, "1:0:0"] = b"message"
    app.backend.store_result("1", None, state)
    postman.end_unclaimed(lines, LOCK, ["1:0:0"])
    assert lines.store.asked("withdraw") == [(LOCK, "1:0:0", "")]
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert (
        f"1:0:0 for lock 'k' cannot be run, and is set aside in {LOCK}:aside: its result is {state}"
        in (record.message)
    )


@pytest.mark.parametrize("state", ["PENDING", "PARKED", "STARTED", "RETRY"])
def test_who_has_not_ended_is_left_in_line(app, postman, lines, state):
    """Its queue may be slow, or be without a worker: it is not to be lost for that."""
    lines.parked[LOCK, "1:0:0"] = b"message"
    app.backend.store_result("1", None, state)
    postman.end_unclaimed(lines, LOCK, ["1:0:0"])
    assert lines.store.calls == []


@pytest.mark.parametrize(
    ("error", "levels"),
    [(NotImplementedError("no results"), []), (ConnectionError("away"), [logging.WARNING])],
)
def test_a_backend_that_tells_nothing_leaves_all_in_line(
    app, postman, lines, caplog, monkeypatch, error, levels
):
    """None, or one that is away; results that come by messages are their callers'."""

    def fails(*_):
        raise error

    monkeypatch.setattr(app.backend, "get_state", fails)
    postman.end_unclaimed(lines, LOCK, ["1:0:0", "2:0:0"])
    assert [record.levelno for record in caplog.records] == levels
    monkeypatch.setattr(app.backend, "persistent", False)
    postman.end_unclaimed(lines, LOCK, ["1:0:0"])
    assert [record.levelno for record in caplog.records] == levels
    assert lines.store.calls == []
