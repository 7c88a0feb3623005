"""A task's message: what of it is kept, how it is written down, and how it is published again."""

import json
import pickle
from datetime import date, time, timezone
from uuid import UUID

import pytest
from celery.app.task import Context
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kombu.utils.json import dumps

from celery_dislock import SingletonTask
from celery_dislock.messages.message import AS_IT_CAME, FORMAT, Message
from tests.unit.deliveries import Producer, arrived, noted

BODY = b'[[1], {"name": "\xc3\xbc\\n"}, {}]'
HEADERS = {"id": "1", "task": "t", "retries": 2, "tenant": {"number": [7, None]}}
PROPERTIES = {
    "correlation_id": "1",
    "reply_to": "caller",
    "message_id": "m",
    "type": "kind",
    "app_id": "shop",
    "MessageGroupId": "tenant-7",
    "priority": 0,
    "delivery_mode": 2,
    "expiration": "1500",
}


def delivery(headers=HEADERS, body=BODY, encoding="utf-8", properties=PROPERTIES, **request):
    """Return what Message.of() takes: a request, and what was kept of its message."""
    info = {"exchange": "e", "routing_key": "r", "redelivered": False}
    context = Context({"id": "1", "properties": properties, "delivery_info": info, **request})
    return context, (headers, "application/json", encoding, body)


def message(**changes):
    about = {
        "exchange": "e",
        "routing_key": "r",
        "headers": HEADERS,
        "content_type": "application/json",
        "content_encoding": "utf-8",
        "properties": PROPERTIES,
        "alone": True,
        "body": BODY,
    }
    return Message(**{**about, **changes})


# What is kept


@pytest.mark.parametrize(
    ("body", "encoding", "kept"),
    [
        (BODY, "binary", BODY),
        (memoryview(BODY), "binary", BODY),
        (bytearray(BODY), None, BODY),
        ("ü", "utf-8", b"\xc3\xbc"),
        ("ü", "latin-1", b"\xfc"),
        ("ü", None, b"\xc3\xbc"),
        (b"", "utf-8", b""),
    ],
)
def test_a_body_is_kept_byte_for_byte(body, encoding, kept):
    """Whatever a transport gives, bytes are kept; text is encoded as the message says."""
    found = Message.of(*delivery(body=body, encoding=encoding)).body
    assert (type(found), found) == (bytes, kept)


BITS = "0." * 27


@pytest.mark.parametrize(
    ("exchange", "given", "plain"),
    [
        ("e", "celery", ("e", "celery")),
        ("celery_delayed_delivery", f"{BITS}1.k", ("celery_delayed_delivery", "k")),
        ("celery_delayed_3", f"{BITS}0.k", ("celery_delayed_delivery", "k")),
        ("shop_celery_delayed_12", f"{BITS}0.k", ("shop_celery_delayed_delivery", "k")),
        (
            "celery_delayed_0",
            f"{BITS}1.{BITS}0.a.b",
            ("celery_delayed_delivery", "a.b"),
        ),  # kombu 5.5
        ("celery_delayed_delivery", "k", ("celery_delayed_delivery", "k")),
        ("celery_delayed_0", f"{BITS}k", ("celery_delayed_0", f"{BITS}k")),
        ("", "", ("", "")),
    ],
)
def test_a_delay_is_taken_off_where_a_message_came_from(exchange, given, plain):
    """Native delayed delivery has put it there, each time that the message was delayed."""
    request, kept = delivery()
    request.delivery_info.update(exchange=exchange, routing_key=given)
    found = Message.of(request, kept)
    assert (found.exchange, found.routing_key) == plain


def test_a_transport_may_leave_out_nearly_everything():
    """Without properties, exchange and routing key there is still a message."""
    request, kept = delivery(properties=None)
    request.delivery_info.update(exchange=None, routing_key=None)
    assert Message.of(request, kept) == message(exchange="", routing_key="", properties={})


@pytest.mark.parametrize(
    ("waits", "alone"),
    [("chord", False), ("chain", False), ("callbacks", True), ("errbacks", True)],
)
def test_a_task_for_which_others_wait_is_not_alone(waits, alone):
    """A chord and the rest of a chain are to hear that it is revoked; links are not."""
    assert Message.of(*delivery()) == message()  # as it came
    assert Message.of(*delivery(**{waits: [{"task": "next"}]})).alone is alone


@pytest.mark.parametrize("strategy", ["queue", "skip"])
def test_the_message_goes_to_the_pool_process_alone(app, strategy):
    """What inspect shows of a task has no body in it."""

    @app.task(base=SingletonTask, lock_key="k", lock_on_conflict=strategy)
    def task(n): ...

    request = arrived(task, "1", 7, tenant="seven")
    assert AS_IT_CAME not in request.delivery_info
    assert AS_IT_CAME not in str(request.info())
    sent = Context(request.request_dict)
    request.message.headers["late"] = 1  # what is kept does not change with the request
    assert {**request.delivery_info, AS_IT_CAME: ...}.keys() == sent.delivery_info.keys()
    kept = Message.of(sent, sent.delivery_info[AS_IT_CAME])
    assert "late" not in kept.headers
    assert (kept.headers["tenant"], kept.body) == ("seven", b"[[7], {}, {}]")


def test_a_message_that_is_kept_costs_next_to_nothing(app):
    """Pickle, by which it goes to the pool process, writes headers and body once."""

    @app.task(base=SingletonTask, lock_key="k")
    def task(text): ...

    request = arrived(task, "1", "x" * 10_000, tenant="y" * 10_000)
    sent = (request.request_dict, request.body)
    kept = request.request_dict["delivery_info"].pop(AS_IT_CAME)
    without = len(pickle.dumps(sent))
    request.request_dict["delivery_info"][AS_IT_CAME] = kept
    assert len(pickle.dumps(sent)) - without < 200


# Written down, and read

# Building messages takes long on a busy machine.
patiently = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])

kinds = [None, bool, int, bytes, date, time, UUID]
scalars = st.one_of(
    *(st.none() if kind is None else st.from_type(kind) for kind in kinds),
    st.floats(allow_nan=False),
    st.text(max_size=10),
    st.datetimes(timezones=st.none() | st.just(timezone.utc)),
    st.decimals(allow_nan=False),
)
names = st.text(max_size=20).filter(lambda name: not name.startswith("__"))
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)
tables = st.dictionaries(names, values, max_size=3)
texts = st.none() | st.text(max_size=20)
# Names that mean something have values that can be sent, as in all that Message.of() makes.
headers = st.builds(
    lambda table, task_id, task: {**table, "id": task_id, "task": task},
    *(tables, st.text(max_size=20), st.text(max_size=20)),
)
properties = tables.map(lambda table: {**table, **PROPERTIES})
messages = st.builds(
    Message,
    exchange=st.text(max_size=10),
    routing_key=st.text(max_size=10),
    headers=headers,
    content_type=texts,
    content_encoding=texts,
    properties=properties,
    alone=st.booleans(),
    body=st.binary() | st.just(b"\n") | st.just(b'1 {}\n{"a": 1}\n\n'),
)


@patiently
@given(messages)
def test_what_is_written_is_read(written):
    """Arbitrary headers, of every type that a broker's client knows, and any bytes for a body."""
    assert Message.from_bytes(written.to_bytes()) == written


def test_the_body_is_not_in_what_is_logged():
    """A representation in a log gives away no arguments."""
    assert "body" not in repr(message())


def unreadable(written):
    with pytest.raises(ValueError):  # noqa: PT011 -- the parsers have many words
        Message.from_bytes(written)


def with_header(about, body=BODY):
    return FORMAT + dumps(about).encode() + b"\n" + body


ABOUT = {name: value for name, value in vars(message()).items() if name != "body"}


@patiently
@given(messages, st.data())
def test_a_message_that_was_cut_off_is_refused(written, data):
    """Unless only its body is shorter, which nobody can tell."""
    whole = written.to_bytes()
    unreadable(whole[: data.draw(st.integers(0, len(whole) - len(written.body) - 1))])


@pytest.mark.parametrize(
    "changes",
    [
        *({name: None} for name in ("exchange", "routing_key", "headers", "properties")),
        *({"headers": wrong} for wrong in ([["id", "1"]], {"id": None}, {"task": ["t"]})),
        *({"properties": {"expiration": wrong}} for wrong in ("soon", [], "nan", "-5", 10**400)),
        *({"properties": {"priority": wrong}} for wrong in ([], -1, 10**400, float("inf"))),
        {"properties": {"reply_to": []}},
        *({"headers": {"x": {"__type__": one, "__value__": 5}}} for one in ("colour", "uuid")),
    ],
)
def test_a_field_of_the_wrong_type_is_an_error(changes):
    """Else publishing it would fail, time and again; and unknown fields change what it means."""
    unreadable(with_header({**ABOUT, **changes}))


def test_a_field_that_is_missing_is_an_error():
    """Nor is it a message if it is nested too deep for a parser, or no object at all."""
    for name in ABOUT:
        unreadable(with_header({n: value for n, value in ABOUT.items() if n != name}))
    unreadable(FORMAT + b'{"headers":' + b"[" * 200_000 + b"\n")
    unreadable(with_header([]))


def test_what_is_no_message_is_refused_by_what_it_begins_with():
    """The log shows its beginning."""
    with pytest.raises(ValueError, match=r"begins with b'x \{"):
        Message.from_bytes(b"x" + message().to_bytes()[1:])


@pytest.mark.parametrize("more", [{"colour": "red"}, {"body": "x"}])
def test_a_message_of_a_later_version_is_read_as_far_as_it_is_known(more):
    """What is new in it is left out."""
    written = message().to_bytes()
    new = json.dumps(more)[1:-1].encode()
    later = b"2" + written[1:].replace(b"{", b"{" + new + b",", 1)
    assert Message.from_bytes(later) == Message.from_bytes(written)


class Explosive:
    def __reduce__(self):
        return (pytest.fail, ("it was unpickled",))


def test_nothing_is_unpickled():
    """A pickle in place of a message, or of its body, is bytes and nothing else."""
    bomb = pickle.dumps(Explosive())
    unreadable(bomb)
    unreadable(FORMAT + bomb + b"\n")
    assert Message.from_bytes(message(body=bomb).to_bytes()).body == bomb


# Published again


def published(sent, **notes):
    producer = Producer()
    sent.publish(producer, notes)
    [(body, options)] = producer.sent
    return body, options


def test_the_producer_is_given_what_came():
    """Where it was, with its headers and properties, as bytes of the same type; and our notes."""
    body, options = published(message(), ticket=["lock", "1:0:0"])
    assert body == BODY
    assert options.pop("headers") == {**HEADERS, **noted(ticket=["lock", "1:0:0"])}
    assert options == {
        **PROPERTIES,
        "exchange": "e",
        "routing_key": "r",
        "content_type": "application/json",
        "content_encoding": "utf-8",
        "compression": None,
        "declare": [],
        "expiration": 1.5,  # seconds
    }


def test_a_body_that_came_compressed_is_compressed_again():
    """It is kept as it was before; no property is made up; the message may be sent again."""
    kept = message(headers={**HEADERS, "compression": "application/x-gzip"}, properties={})
    _, options = published(kept)
    assert options["compression"] == "application/x-gzip"
    assert options["headers"] == HEADERS
    assert [options[name] for name in ("priority", "delivery_mode", "expiration")] == [None] * 3
    assert "reply_to" not in options
    assert published(kept) == published(kept)


# How a delivery ends


def test_a_property_that_no_broker_takes_is_left_out():
    """Who sends a message can make it anything, and a transport notes things of one delivery."""
    odd = {"expiration": "soon", "priority": "high", "correlation_id": {}, "app_id": None}
    of_one_delivery = {"delivery_tag": "x", "delivery_info": {"exchange": "e"}, "user_id": "guest"}
    of_one_delivery |= {"MessageDeduplicationId": "1", "DelaySeconds": 5}
    kept = Message.of(*delivery(properties={**PROPERTIES, **odd, **of_one_delivery})).properties
    assert kept == {name: value for name, value in PROPERTIES.items() if name not in odd}
