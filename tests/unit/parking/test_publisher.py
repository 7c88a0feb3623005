"""Publishing parked tasks whose turn it is, and ending those that lost their place."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
from celery import Celery
from celery.exceptions import TaskRevokedError
from kombu import Exchange, Queue
from kombu.exceptions import OperationalError

from celery_dislock.messages.headers import REPLACED_HEADER, TICKET_HEADER, UNIQUE_HEADER
from celery_dislock.messages.message import Message
from celery_dislock.parking.publisher import Publisher
from celery_dislock.servers.replies import Turn
from tests.unit.deliveries import Producer
from tests.unit.fakes import FakeLines

LOCK = "dislock:{k}"
REASON = "a newer task took its place in line for lock 'k'"


@pytest.fixture
def lines(world):
    return FakeLines(world.store)


@pytest.fixture
def producer(app, monkeypatch):
    producer = Producer()
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
    assert options["headers"] == {"id": "2", "task": "t", TICKET_HEADER: [LOCK, "2:0:0"]}
    assert (options["exchange"], options["routing_key"]) == ("e", "r")
    assert lines.store.calls == []


def test_a_message_of_celerys_first_protocol_keeps_its_ticket(postman, producer, lines):
    """Its body has the id: the headers do not say whose it is."""
    message = replace(Message.from_bytes(parked("a@b")), headers={}).to_bytes()
    postman.hand_over(lines, [turn("a@b", message)])
    [(_, options)] = producer.sent
    assert options["headers"] == {TICKET_HEADER: [LOCK, "a@b:0:0"]}


@pytest.mark.parametrize("error", [OperationalError("refused"), OSError("refused")])
def test_a_broker_that_is_away_does_not_disturb_who_releases(
    postman, producer, lines, caplog, error
):
    """It is asked once, and the log names all tasks, which have their turn again soon."""
    producer.away = error
    postman.hand_over(lines, [turn("1"), turn("2")])
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    named = "t[1] for lock 'k', t[2] for lock 'k'"
    assert f"will be sent again by the next sweep: {named}: refused" in record.message


def test_turns_that_cannot_be_sent_are_given_back(postman, producer, lines):
    """All that were not sent: else a long outage of the broker made each turn a long one."""
    producer.away = OperationalError("refused")
    postman.hand_over(lines, [turn("1"), turn("2")])
    assert lines.store.calls == [("give_back", LOCK, "1:0:0"), ("give_back", LOCK, "2:0:0")]


def test_a_lock_server_that_is_away_too_lets_the_turns_run_out(postman, producer, lines, caplog):
    """Whoever released has done its own task all the same."""
    producer.away = OperationalError("refused")
    lines.store.away = True
    postman.hand_over(lines, [turn("1"), turn("2")])
    [record] = caplog.records
    assert "again when their turns have run out, as the lock server is away" in record.message


@pytest.mark.parametrize(
    ("kind", "exchange", "declared"),
    [
        ("amqp", "e", []),
        ("redis", "e", ["q1", "q2"]),
        ("redis", "unknown", []),
        ("redis", "", []),
    ],
)
def test_a_broker_that_forgets_exchanges_is_told_of_them(
    app, postman, lines, monkeypatch, kind, exchange, declared
):
    """Of the queues of the message's own exchange; AMQP brokers know them, as all the default."""
    producer = Producer(kind)
    monkeypatch.setattr(app, "producer_or_acquire", producer.acquired)
    queues = [("q1", "e"), ("q2", "e"), ("q3", "other")]
    app.conf.task_queues = [Queue(name, Exchange(its)) for name, its in queues] + [Queue("q4")]
    message = replace(Message.from_bytes(parked("1")), exchange=exchange).to_bytes()
    postman.hand_over(lines, [turn("1", message)])
    [(_, options)] = producer.sent
    assert [queue.name for queue in options["declare"]] == declared


def test_what_went_through_before_the_broker_went_away_is_not_reported(
    postman, producer, lines, monkeypatch, caplog
):
    """Only those that were not sent have their turn again."""
    publish = producer.publish

    def once(body, **options):
        publish(body, **options)
        producer.away = OperationalError("refused")

    monkeypatch.setattr(producer, "publish", once)
    postman.hand_over(lines, [turn("1"), turn("2"), turn("3")])
    assert [body for body, _ in producer.sent] == [b"1"]
    assert "sweep: t[2] for lock 'k', t[3] for lock 'k': refused" in caplog.text


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


def test_no_connection_to_the_broker_is_no_error_either(app, postman, lines, monkeypatch, caplog):
    """The pool of producers may be the one that fails."""

    def exhausted():
        raise OSError("no more connections")

    monkeypatch.setattr(app, "producer_or_acquire", exhausted)
    postman.hand_over(lines, [turn("1")])
    assert "t[1] for lock 'k': no more connections" in caplog.text


def test_a_stop_of_the_worker_is_not_swallowed(postman, producer, lines):
    """Only errors are: SystemExit is none."""
    producer.away = SystemExit()
    with pytest.raises(SystemExit):
        postman.hand_over(lines, [turn("1")])


def test_a_damaged_message_is_set_aside_and_the_others_are_published(
    postman, producer, lines, caplog
):
    """It is kept for people to see, and reported; it holds up nobody."""
    postman.hand_over(lines, [turn("1"), turn("2", b"rubbish"), turn("3")])
    assert [body for body, _ in producer.sent] == [b"1", b"3"]
    assert lines.store.asked("set_aside") == [(LOCK, "2:0:0", b"rubbish")]
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert f"cannot be run, and is set aside in {LOCK}:aside: it begins" in record.message


def test_whose_turn_it_is_after_a_damaged_one_is_published_too(postman, producer, lines):
    """Setting one aside frees its turn for the next; that one may be damaged as well."""
    lines.next_turns = [[turn("2", b"rubbish"), turn("3")], [turn("4")]]
    postman.hand_over(lines, [turn("1", b"rubbish")])
    assert [body for body, _ in producer.sent] == [b"3", b"4"]
    assert [ticket for _, ticket, _ in lines.store.asked("set_aside")] == ["1:0:0", "2:0:0"]


def test_nothing_but_damaged_ones_asks_for_no_broker(app, postman, lines, monkeypatch):
    """Without a message there is nothing to publish."""
    monkeypatch.setattr(app, "producer_or_acquire", None)
    postman.hand_over(lines, [])
    postman.hand_over(lines, [turn("1", b"rubbish")])
    assert len(lines.store.asked("set_aside")) == 1


def test_a_record_that_the_script_has_set_aside_is_only_reported(postman, lines, caplog):
    """Its message is empty: the record that nobody could read is in its place already."""
    postman.hand_over(lines, [turn("1", b"")])
    assert "Parked task 1:0:0 for lock 'k' cannot be run, and is set aside" in caplog.text
    assert "the record of its ticket cannot be read" in caplog.text
    assert lines.store.calls == []


def test_a_record_that_is_gone_is_reported_and_not_set_aside(postman, lines, caplog):
    """There is nothing that people could see."""
    postman.hand_over(lines, [Turn(LOCK, "1:0:0", None)])
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert "1:0:0 cannot be run: its message is gone from the lock server" in record.message
    assert lines.store.calls == []


def test_a_lock_server_that_is_away_keeps_a_damaged_message_in_line(
    postman, producer, lines, caplog
):
    """Nothing is lost, and the others are published all the same."""
    lines.store.away = True
    postman.hand_over(lines, [turn("1", b"rubbish"), turn("2")])
    [record] = caplog.records
    assert "stays in line until the lock server answers" in record.message
    assert [body for body, _ in producer.sent] == [b"2"]


# Who lost its place


@pytest.fixture
def task(app):
    @app.task(name="t")
    def task(): ...

    @app.task(name="ignoring", ignore_result=True)
    def ignoring(): ...

    app.finalize()
    return task


def tell_replaced(postman, lines, replaced, end_reservation=lambda _request: None):
    return postman.tell_replaced(lines, LOCK, replaced, end_reservation)


def result(app, task_id="1"):
    found = app.AsyncResult(task_id)
    return found.state, found.result


def test_a_task_that_is_alone_ends_as_revoked(app, task, postman, producer, lines, caplog):
    """Its result says why, as if it had been skipped; it leaves the line after that."""
    caplog.set_level("INFO", "celery_dislock")
    left = []
    lines.leave = lambda *told: left.append((*told, result(app)[0])) or True
    ended = tell_replaced(postman, lines, {"1:0:0": parked("1")})
    assert ended == {"1": REASON}
    state, error = result(app)
    assert (state, type(error), str(error)) == ("REVOKED", TaskRevokedError, REASON)
    assert left == [(LOCK, "1:0:0", "REVOKED")]
    assert producer.sent == []
    assert f"Task t[1] skipped: {REASON}. It does not run." in caplog.text


def test_its_reservation_ends_after_its_result_is_stored(app, task, postman, lines):
    """Its key is free then; that of a task which a worker ends is freed there."""
    ended = []

    def end_reservation(request):
        header = request.headers[UNIQUE_HEADER]
        ended.append((request.id, header, result(app)[0], lines.store.asked("leave")))

    header = [LOCK, "end", "ab", 3]
    told = {
        "1:0:0": parked("1", **{UNIQUE_HEADER: header}),
        "2:0:0": parked("2", alone=False, **{UNIQUE_HEADER: header}),
    }
    tell_replaced(postman, lines, told, end_reservation)
    assert ended == [("1", header, "REVOKED", [])]


def test_a_task_that_several_end_at_once_is_logged_by_one(app, task, postman, lines, caplog):
    """By the one that has taken it off the list of those that are to be ended."""
    caplog.set_level("INFO", "celery_dislock")
    lines.parked[LOCK, "1:0:0"] = b""
    for _ in range(3):
        tell_replaced(postman, lines, {"1:0:0": parked("1")})
    assert caplog.text.count("skipped") == 1


def test_one_that_a_worker_ends_is_logged_there(app, task, postman, lines, caplog):
    """Not here, too: one line for one event."""
    caplog.set_level("INFO", "celery_dislock")
    lines.parked[LOCK, "1:0:0"] = b""
    tell_replaced(postman, lines, {"1:0:0": parked("1", alone=False)})
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("name", "asked", "state"),
    [
        ("t", {"ignore_result": True}, "PENDING"),
        ("ignoring", {}, "PENDING"),
        ("ignoring", {"ignore_result": False}, "REVOKED"),
    ],
)
def test_no_result_is_stored_where_it_is_ignored(app, task, postman, lines, name, asked, state):
    """The message says whether its result is wanted; where it does not, the task's option does."""
    tell_replaced(postman, lines, {"1:0:0": parked("1", name, **asked)})
    assert result(app)[0] == state
    assert lines.store.asked("leave") == [(LOCK, "1:0:0")]


@pytest.mark.parametrize(("name", "alone"), [("t", False), ("unknown", True)])
def test_one_that_others_wait_for_is_ended_by_a_worker(
    app, task, postman, producer, lines, name, alone
):
    """Only who knows the task can read its body, and with it the chord and the chain to be told."""
    tell_replaced(postman, lines, {"1:0:0": parked("1", name, alone)})
    [(body, options)] = producer.sent
    assert body == b"1"
    assert options["headers"] == {"id": "1", "task": name, REPLACED_HEADER: REASON}
    assert result(app)[0] == "PENDING"
    assert lines.store.asked("leave") == [(LOCK, "1:0:0")]


def test_one_that_could_not_be_told_is_told_again(app, task, postman, producer, lines, caplog):
    """It leaves only after it was told, and does not keep the others from being told."""
    producer.away = OperationalError("refused")
    tell_replaced(postman, lines, {"1:0:0": parked("1", alone=False), "2:0:0": parked("2")})
    assert lines.store.asked("leave") == [(LOCK, "2:0:0")]
    assert result(app, "2")[0] == "REVOKED"
    assert (
        "Task t[1] lost its place in line for lock 'k'; its result will say so when" in caplog.text
    )


def test_a_result_that_cannot_be_stored_is_stored_later(app, task, postman, lines, monkeypatch):
    """The result backend may be away: what it raises is not for the one that releases."""

    def store_result(*args, **kwargs):
        raise ConnectionError("backend")

    monkeypatch.setattr(app.backend, "store_result", store_result)
    tell_replaced(postman, lines, {"1:0:0": parked("1")})
    assert lines.store.calls == []


def test_a_lock_server_that_is_away_has_it_told_twice(app, task, postman, lines, caplog):
    """Better told again than never: the result is there, and the next sweep tells it once more."""
    lines.store.away = True
    tell_replaced(postman, lines, {"1:0:0": parked("1"), "2:0:0": parked("2")})
    assert (result(app)[0], result(app, "2")[0]) == ("REVOKED", "REVOKED")
    assert caplog.text.count("will say so when") == 2


def test_one_that_nobody_can_read_is_set_aside(app, task, postman, producer, lines):
    """Whose turn it is now, is published."""
    lines.next_turns = [[turn("3")]]
    tell_replaced(postman, lines, {"1:0:0": b"rubbish", "2:0:0": parked("2")})
    assert lines.store.asked("set_aside") == [(LOCK, "1:0:0", b"rubbish")]
    assert [body for body, _ in producer.sent] == [b"3"]
    assert result(app, "2")[0] == "REVOKED"


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
    assert home(one) == home(other)


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
        (
            {"url": "filesystem://", "transport": {"data_folder_out": "/a"}},
            {"url": "filesystem://", "transport": {"data_folder_out": "/b"}},
        ),
        (
            {"url": "filesystem://", "transport": {"control_folder": "/a"}},
            {"url": "filesystem://", "transport": {"control_folder": "/b"}},
        ),
        (
            {"url": "redis+socket:///r.sock?virtual_host=1"},
            {"url": "redis+socket:///r.sock?virtual_host=2"},
        ),
        (
            {"url": "sentinel://h:1", "transport": {"master_name": "a"}},
            {"url": "sentinel://h:1", "transport": {"master_name": "b"}},
        ),
        (
            {"url": "sqs://", "transport": {"region": "eu-west-1"}},
            {"url": "sqs://", "transport": {"region": "us-east-1"}},
        ),
    ],
)
def test_two_places_are_two_homes(one, other):
    """Host, database, virtual host, prefix, folder: a task goes back to where it came from."""
    assert home(**one) != home(**other)


def test_other_transport_options_do_not_matter():
    """How long to wait for a broker, and the like, says nothing about where it is."""
    assert home(transport={"visibility_timeout": 60}) == home(transport={}) == home()


def test_a_home_gives_away_nothing():
    """It is part of names in Redis, and stands without spaces in what scripts read."""
    app = Celery("shop", broker="redis://me:hunter2@h:1/0", set_as_current=False)
    assert Publisher(app).home == home("redis://h:1/0")
    assert len(Publisher(app).home) == 12
    assert set(Publisher(app).home) <= set("0123456789abcdef")


def test_a_broker_may_come_without_a_url():
    """An app that names none has a home all the same."""
    assert Publisher(Celery("shop", set_as_current=False)).home
    assert home("")


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


@pytest.mark.parametrize("error", [NotImplementedError("no results"), ConnectionError("away")])
def test_a_backend_that_tells_nothing_leaves_all_in_line(
    app, postman, lines, caplog, monkeypatch, error
):
    """None, or one that is away; only that is logged."""

    def fails(*_):
        raise error

    monkeypatch.setattr(app.backend, "get_state", fails)
    postman.end_unclaimed(lines, LOCK, ["1:0:0", "2:0:0"])
    assert lines.store.calls == []
    assert [record.levelno for record in caplog.records] == (
        [logging.WARNING] if isinstance(error, ConnectionError) else []
    )


def test_results_that_come_by_messages_are_not_taken(app, postman, lines, monkeypatch):
    """They are their callers': the rpc backend."""
    monkeypatch.setattr(app.backend, "persistent", False)
    app.backend.store_result("1", None, "FAILURE")
    postman.end_unclaimed(lines, LOCK, ["1:0:0"])
    assert lines.store.calls == []


# Dropped by an operator


def dropped(reason, task_id="1", alone=True):
    """Make the message of a task that an operator has dropped."""
    message = Message.from_bytes(parked(task_id, alone=alone))
    return replace(message, headers={**message.headers, REPLACED_HEADER: reason}).to_bytes()


def test_a_message_may_say_itself_why_it_does_not_run(app, task, postman, lines, caplog):
    """Its result and the log have that reason, whoever tells it."""
    caplog.set_level("INFO", "celery_dislock")
    lines.parked[LOCK, "1:0:0"] = b""
    tell_replaced(postman, lines, {"1:0:0": dropped("dropped by an operator")})
    state, error = result(app)
    assert (state, str(error)) == ("REVOKED", "dropped by an operator")
    assert "Task t[1] skipped: dropped by an operator. It does not run." in caplog.text


def test_a_worker_that_ends_it_is_told_the_same(app, task, postman, producer, lines):
    """It goes on in the header of the message."""
    tell_replaced(postman, lines, {"1:0:0": dropped("dropped by an operator", alone=False)})
    [(_, options)] = producer.sent
    assert options["headers"][REPLACED_HEADER] == "dropped by an operator"


@pytest.mark.parametrize("reason", ["", "a\nb", "x" * 1001, 7, None, ["x"]])
def test_a_reason_that_nobody_has_written_so_is_no_reason(app, task, postman, lines, reason):
    """The usual one takes its place."""
    tell_replaced(postman, lines, {"1:0:0": dropped(reason)})
    assert str(result(app)[1]) == REASON
