"""The queues that a message reaches, and the one to which it is sent again."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from celery import Celery
from kombu import Exchange, Queue, binding
from kombu.common import Broadcast

from celery_dislock.messages.routes import known_here, reached, to_one_queue
from tests.unit.messages.test_resending import message

TOPIC, DIRECT, DELAYED = Exchange("topic", "topic"), Exchange("direct"), "celery_delayed_delivery"
KEYS = {
    "one": "shop.one",
    "same": "shop.one",
    "star": "shop.*",
    "hash": "shop.#",
    "inside": "#.one.#",
    "last": "one",
    "other": "stock.one",
}


@pytest.fixture(params=["classic", "quorum"])
def app(request):
    """An app with queues that overlap."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    arguments = {"x-queue-type": request.param}
    app.conf.task_queues = [
        *(Queue(name, TOPIC, key, queue_arguments=arguments) for name, key in KEYS.items()),
        *(Queue(name, DIRECT, "key", queue_arguments=arguments) for name in ("first", "second")),
        Queue("alone", DIRECT, "alone"),
        Queue("bound", bindings=[binding(Exchange("more", "topic"), "a.#")]),
        Queue("headers", Exchange("by-headers", "headers")),
        Queue("more", Exchange("more", "topic"), "a.b.c"),
        Broadcast("all"),
    ]
    return app


@pytest.mark.parametrize(
    ("exchange", "key", "names"),
    [
        ("topic", "shop.one", "one same star hash inside"),
        ("topic", "shop", "hash"),
        ("topic", "shop.two.three", "hash"),
        ("topic", "stock.one", "inside other"),
        ("topic", "one", "inside last"),
        ("topic", "", ""),
        ("direct", "key", "first second"),
        ("direct", "alone", "alone"),
        ("direct", "shop.one", ""),
        ("more", "a.b.c", "bound more"),
        ("more", "a", "bound"),
        ("by-headers", "any", "headers"),
        ("unknown", "shop.one", ""),
        ("", "one", ""),
    ],
)
def test_the_queues_that_a_message_reaches(app, exchange, key, names):
    """Where Celery delays messages natively, it binds a queue to the ends of keys, too."""
    found = {one.name for one in reached(app, exchange, key)}
    expected = set(names.split())
    if app.conf.task_queues[0].queue_arguments["x-queue-type"] == "quorum" and key.endswith(".one"):
        expected |= {"last"} if exchange == "topic" else set()
    assert found == expected


def test_delayed_delivery_reaches_the_queues_of_all_exchanges_but_direct_ones(app):
    app.amqp.queues.add(Queue("elsewhere", Exchange("elsewhere", "topic"), "stock.one"))
    found = {one.name for one in reached(app, DELAYED, "stock.one")}
    assert found == {"inside", "last", "other", "elsewhere"}
    assert reached(app, DELAYED, "key") == []


@pytest.mark.parametrize(
    ("exchange", "key", "here", "queue"),
    [
        ("topic", "shop.one", None, "one"),
        ("topic", "shop.one", ["star", "hash"], "star"),
        ("topic", "shop.one", ["first"], None),  # it came from a queue that the app does not know
        ("direct", "key", ["second"], "second"),
        ("direct", "alone", None, None),
        ("all", "", None, None),
        ("", "one", None, None),
    ],
)
def test_a_message_goes_to_one_of_its_queues_again(app, exchange, key, here, queue):
    """To one from which this worker consumes, as that may be where it came from."""
    app.amqp.queues.select(here)
    sent = to_one_queue(app, message(exchange, key))
    assert (sent.exchange, sent.routing_key) == (("", queue) if queue else (exchange, key))
    assert sent.headers == message().headers


BY_HEADERS = {
    "pdf": {"kind": "pdf"},
    "csv": {"x-match": "all", "kind": "csv", "x-of": "nobody"},
    "small csv": {"kind": "csv", "size": 1},
    "any": {"x-match": "any", "kind": "xml", "size": [1]},
    "there": {"tenant": None},
    "of": {"x-match": "any-with-x", "x-of": "me"},
}


@pytest.mark.parametrize(
    ("headers", "names"),
    [
        ({"kind": "csv"}, ["csv"]),
        ({"kind": "csv", "size": 1}, ["csv", "small csv"]),
        ({"kind": "txt", "size": [1]}, ["any"]),
        ({"tenant": "t"}, ["there"]),
        ({"x-of": "me"}, ["of"]),
        ({}, []),
        (None, list(BY_HEADERS)),
    ],
)
def test_the_queues_that_a_message_reaches_by_its_headers(app, headers, names):
    """A task for one machine must not come to another machine's queue after a delay."""
    exchange = Exchange("kinds", "headers")
    for name, arguments in BY_HEADERS.items():
        app.amqp.queues.add(Queue(name, exchange, binding_arguments=arguments))
    app.amqp.queues.add(
        Queue("bound twice", bindings=[binding(exchange, arguments={"kind": "pdf", "size": 2})])
    )
    found = [one.name for one in reached(app, "kinds", "any", headers)]
    assert found == [*names, *(["bound twice"] if headers is None else [])]
    if len(names) == 1:
        sent = to_one_queue(app, replace(message("kinds", "any"), headers=headers))
        assert (sent.exchange, sent.routing_key) == ("kinds", "any")


def test_a_queue_that_was_added_later_is_named_to_the_pool_process(app):
    """If its exchange is one whose type has to be known, and the broker is none of AMQP."""
    app.amqp.queues.select_add(Queue("late", Exchange("late", "topic"), "late.#"))
    app.amqp.queues.select_add(Queue("plain", Exchange("plain"), "plain"))
    with app.connection_for_read() as connection, connection.channel() as channel:
        for exchange, key, names in [
            ("late", "late.one", ["late"]),
            ("late", "other", []),
            ("late", {"of": "a stranger"}, []),
            (["late"], "late.one", []),
            ("plain", "plain", []),
            ("topic", "shop.one", []),
            ("all", "", []),
            ("", "late", []),
        ]:
            info = {"exchange": exchange, "routing_key": key}
            came = SimpleNamespace(channel=channel)
            assert known_here(app, SimpleNamespace(delivery_info=info, message=came)) == names
            came.channel = None
            assert known_here(app, SimpleNamespace(delivery_info=info, message=came)) == []
