"""A message that is sent again: to where, and after which delay, whatever the broker can do."""

import os
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import pytest
from celery import Celery
from celery.app.task import Context
from kombu import Exchange, Queue

from celery_dislock.messages.message import Message, undelayed
from celery_dislock.messages.resending import in_time, publish, retry_options
from tests.unit.deliveries import noted

BITS = "0." * 26


@pytest.fixture(params=["quorum", "classic", "redis"])
def kind(request):
    return request.param


@pytest.fixture
def app(kind):
    """An app whose two queues are of a kind, and what it publishes."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    arguments = {"x-queue-type": "quorum"} if kind == "quorum" else {}
    app.conf.task_queues = [
        Queue(name, Exchange(name, of_type), name, queue_arguments=arguments)
        for name, of_type in [("first", "topic"), ("second", "topic"), ("plain", "direct")]
    ]
    app.sent = []
    transport = SimpleNamespace(driver_type="redis" if kind == "redis" else "amqp")
    connection = SimpleNamespace(transport=transport)

    def take(body, **options):
        app.sent.append(options)

    producer = SimpleNamespace(connection=connection, publish=take, listen=lambda: None)
    own = SimpleNamespace(send=lambda publish: publish(producer))
    vars(app)["_dislock_producers"] = {os.getpid(): own}
    connections = SimpleNamespace(connection=connection)
    app.amqp._producer_pool = SimpleNamespace(connections=connections)
    return app


def message(exchange="first", routing_key="first", **headers):
    about = {"id": "1", "task": "t", **headers}
    properties = {"expiration": "60000", "priority": 3}
    known = about, "application/json", "utf-8", properties, True, b"[[], {}, {}]"
    return Message(exchange, routing_key, *known)


@pytest.mark.parametrize(
    ("exchange", "key", "delayed"),
    [
        ("first", "first", True),
        ("celery_delayed_delivery", "first", True),
        ("first", "k" * 199, True),
        ("first", "k" * 200, False),  # too long for AMQP, with the delay before it
        ("first", "", False),
        ("plain", "plain", False),
        ("", "plain", False),
        ("unknown", "first", False),
    ],
)
def test_a_delay_is_in_whole_seconds_where_the_broker_delays(app, kind, exchange, key, delayed):
    """Rounded up, one at least; elsewhere the message has an ETA, and a worker waits for it."""
    sent = message(exchange, key, eta="2020-01-01T00:00:00+00:00")
    for delay, whole in ((0.2, 1), (1.0, 1), (1.01, 2), (75.0, 75)):
        app.sent.clear()
        until = datetime.now(timezone.utc) + timedelta(seconds=delay)
        taken = publish(app, sent, {"put_off": 1}, delay=delay)
        [options] = app.sent
        assert options["headers"]["dislock"] == {"v": 1, "put_off": 1}
        if kind == "quorum" and delayed:
            assert (taken, options["exchange"]) == (whole, "celery_delayed_27")
            bits, _, rest = options["routing_key"].partition(f".{key}")
            assert (int(bits.replace(".", ""), 2), rest) == (whole, "")
            assert undelayed("celery_delayed_0", options["routing_key"])[1] == key
            assert options["headers"]["eta"] == sent.headers["eta"]
            assert options["expiration"] is None
        else:
            assert (taken, options["exchange"], options["routing_key"]) == (delay, exchange, key)
            eta = datetime.fromisoformat(options["headers"]["eta"])
            assert until <= eta <= until + timedelta(seconds=30)
            assert options["expiration"] == 60
    assert sent.headers["eta"].startswith("2020")


def test_a_broker_does_not_delay_what_it_would_copy(app, kind):
    """Celery binds all queues to the exchange of delayed delivery, by their routing keys alone."""
    for name, key in [("third", "third"), ("fourth", "third"), ("nested", "first.nested")]:
        app.amqp.queues.add(Queue(name, Exchange(name, "topic"), key))
    for exchange, key, copied in [("third", "third", True), ("second", "second", False)]:
        publish(app, message(exchange, key), {}, delay=5)
        is_delayed = kind == "quorum" and not copied
        assert app.sent[-1]["exchange"] == ("celery_delayed_27" if is_delayed else exchange)
        assert ("eta" in app.sent[-1]["headers"]) is not is_delayed


@pytest.mark.parametrize(
    ("options", "most"),
    [({}, 600), ({"visibility_timeout": 60}, 30), ({"visibility_timeout": 43_200}, 600)],
)
def test_a_message_is_delayed_for_no_longer_than_its_broker_waits(app, kind, options, most):
    """A worker that keeps it gets another one: RabbitMQ waits for 30 minutes, Redis for an hour."""
    app.conf.broker_transport_options = options
    assert publish(app, message(), {}, delay=7200) == (7200 if kind == "quorum" else most)
    assert publish(app, message("plain", "plain"), {}, delay=7200) == most
    assert publish(app, message(), {}, delay=20) == 20


def test_without_a_delay_a_message_goes_to_where_it_came_from(app):
    """Its ETA is over, and stays what it was."""
    publish(app, message("celery_delayed_delivery", "first"), {})
    assert app.sent[0]["exchange"] == "celery_delayed_delivery"
    assert app.sent[0]["routing_key"] == "first"
    assert app.sent[0]["headers"] == {"id": "1", "task": "t"}


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (0.3, 1),
        (1, 1),
        (1.2, 2),
        (2.5, 2.5),  # Celery rounds it down, and a worker waits for the rest
        (0, 0),
        (None, None),
        (-3, -3),
    ],
)
def test_a_countdown_is_one_that_the_broker_takes(app, kind, given, taken):
    """Celery asks for no delay if it is less than a second, and then the broker refuses it."""
    options = in_time(app, {"countdown": given, "task_id": "1"})
    assert options["countdown"] == (taken if kind == "quorum" else given)
    assert options["task_id"] == "1"


@pytest.mark.parametrize("as_text", [False, True])
def test_an_eta_within_a_second_is_a_countdown_of_one(app, kind, as_text):
    """One that is further away, or over, stays."""
    now = datetime.now(timezone.utc)
    for seconds, changes in ((0.9, True), (60, False), (-60, False)):
        eta = now + timedelta(seconds=seconds)
        options = {"eta": eta.isoformat() if as_text else eta}
        found = in_time(app, dict(options))
        if changes and kind == "quorum":
            assert found == {"eta": None, "countdown": 1}
        else:
            assert found == options


@pytest.mark.parametrize(
    ("came_from", "goes_to"),
    [
        (("first", "first"), "first"),
        (("celery_delayed_0", f"{BITS}1.0.second"), "second"),
        (("celery_delayed_delivery", f"{BITS}0.1.{BITS}0.1.second"), "second"),
        (("plain", "plain"), ("plain", "plain")),
        (("celery_delayed_delivery", f"{BITS}0.1.other"), ("celery_delayed_delivery", "other")),
        (("other", "other"), ("other", "other")),
    ],
)
def test_a_retry_goes_to_the_queue_that_its_task_came_from(app, came_from, goes_to):
    """Celery copies where it was delivered from, and delays it to the app's default queue."""
    exchange, routing_key = came_from
    options = {"exchange": exchange, "routing_key": routing_key, "task_id": "1", "countdown": 3}
    options = retry_options(app, options, Context({"id": "1"}))
    if isinstance(goes_to, str):
        assert options.pop("queue").name == goes_to
        assert options.keys() == {"task_id", "countdown", "headers"}
    else:
        assert (options["exchange"], options["routing_key"]) == goes_to
        assert "queue" not in options


def test_a_retry_whose_body_has_chosen_a_queue_goes_there(app):
    """It is what ``self.retry(queue="other")`` asks for."""
    options = {"queue": "other", "exchange": "first", "routing_key": "first"}
    assert retry_options(app, options, Context({"id": "1"})).items() >= options.items()


def test_a_retry_has_the_headers_of_its_task_alone(app):
    """Not those of the broker, nor notes of the delivery; with those that belong to the message."""
    came = noted(sent=5, unique=["lock", "end"], put_off=3, ticket=["lock", "1:0:0"])
    copied = {
        "tenant": 7,
        "x-death": [],
        "x-delivery-count": 3,
        **noted(held=["1@w", "dislock:{k}"], sent=4),
    }
    options = retry_options(app, {"headers": copied}, Context({"id": "1", **came}))
    assert options["headers"] == {"tenant": 7, **noted(sent=5, unique=["lock", "end"])}
    foreign = retry_options(
        app, {"headers": {"trace": 1}}, Context({"headers": {"trace": 1}, **came})
    )
    assert foreign["headers"] == {"trace": 1, **noted(sent=5, unique=["lock", "end"])}
    assert retry_options(app, {"headers": None}, Context({"id": "1"}))["headers"] == {}
