"""Send a task's message again: at once or after a delay, to the exchange that its sender used.

RabbitMQ keeps delayed messages itself if one of the app's queues is a quorum queue: Celery calls
that native delayed delivery.  It knows whole seconds only, and takes no delay of less than one.
Elsewhere a delayed message has an ETA, and a worker keeps it until then.  A broker delivers again
what a worker keeps for long: RabbitMQ after 30 minutes, Redis after its ``visibility_timeout``.  So
a message with a longer delay comes before its time, and is put off again.
"""

from __future__ import annotations

import math
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from celery.utils.quorum_queues import detect_quorum_queues
from kombu.transport.native_delayed_delivery import MAX_LEVEL, calculate_routing_key, level_name

from celery_dislock.messages.broker import own_producers
from celery_dislock.messages.delivery import delay_of
from celery_dislock.messages.headers import HEADER, as_sent, notes_of, with_notes
from celery_dislock.messages.message import DELAYED_DELIVERY, undelayed
from celery_dislock.messages.routes import queues_of, reached

if TYPE_CHECKING:
    from collections.abc import Mapping

    from celery import Celery
    from celery.app.task import Context

    from celery_dislock.messages.broker import OwnProducer
    from celery_dislock.messages.message import Message

DELAY_LEAST = 1  # seconds: the shortest delay that native delayed delivery takes
REPLACEMENTS = "replaced_task_nesting"  # option of a message, and a header from protocol 2 on
KEPT_MOST = 600.0  # seconds for which a worker keeps a message; less if its broker waits for less
# Bytes of a routing key; AMQP writes 255, and the delay stands before it.
ROUTING_KEY_MOST = 255 - 2 * (MAX_LEVEL + 1)


def publish(
    app: Celery, message: Message, notes: Mapping[str, Any], *, delay: float = 0.0
) -> float:
    """
    Publish a message again; blocks for some seconds at most.

    Args:
        app: An app of the broker that the message came from.
        message: The message.
        notes: Notes to add for the next delivery.
        delay: Seconds until the message is delivered, >= 0.

    Returns:
        The seconds until the message is delivered: rounded if the broker delays it, and less than
        *delay* if a worker cannot keep it for so long.

    Raises:
        OperationalError: The broker is away.
        RefusedError: The broker does not take the message.
        Exception: Any other error of the broker's client.
    """
    return own_producers(app).send(partial(_publish, app, message, notes, delay))


def _publish(
    app: Celery, message: Message, notes: Mapping[str, Any], delay: float, producer: OwnProducer
) -> float:
    kind = producer.connection.transport.driver_type
    # Transports other than AMQP know the type of an exchange only after its declaration.
    is_known = kind == "amqp" or not message.exchange
    declare = [] if is_known else queues_of(app, message.exchange)
    delayed: dict[str, Any] = {}
    if delay and _is_delayed_by_broker(app, kind, message):
        delay = math.ceil(delay)
        delayed = {
            "exchange": level_name(MAX_LEVEL),
            "routing_key": calculate_routing_key(delay, message.routing_key),
            "expiration": None,  # an expiration would cut the delay short
        }
    elif delay:
        delay = min(delay, _kept_most(app))
        eta = app.now() + timedelta(seconds=delay)
        delayed = {"headers": {"eta": eta.isoformat()}}
    message.publish(producer, notes, declare, **delayed)
    if kind == "amqp" and delayed.get("exchange", message.exchange):
        producer.listen()  # the default exchange refuses nothing
    return delay


def _is_delayed_by_broker(app: Celery, kind: str, message: Message) -> bool:
    """Tell whether the broker can delay a message: Celery has bound the queue for delays."""
    fits = 0 < len(message.routing_key.encode()) <= ROUTING_KEY_MOST
    if not (fits and detect_quorum_queues(app, kind)[0]):
        return False
    if len(reached(app, DELAYED_DELIVERY, message.routing_key)) > 1:
        return False  # it would come to all of them
    was_delayed = message.exchange.endswith(DELAYED_DELIVERY)
    queues = queues_of(app, message.exchange)
    return was_delayed or any(queue.exchange.type != "direct" for queue in queues)


def _kept_most(app: Celery) -> float:
    """Return for how many seconds a worker may keep a message, before its broker sends another."""
    visible_for = (app.conf.broker_transport_options or {}).get("visibility_timeout")
    return KEPT_MOST if visible_for is None else min(KEPT_MOST, float(visible_for) / 2)


def in_time(app: Celery, options: dict[str, Any]) -> dict[str, Any]:
    """
    Return the options of a message with a delay that the broker takes.

    Celery sends whole seconds, rounded down, and lets a worker wait for the rest.

    Args:
        app: The app that sends the message.
        options: Options of Celery's ``send_task``.
    """
    delay = delay_of(options)
    if 0 < delay < DELAY_LEAST + 1:  # + 1: of an ETA, some time passes before Celery reads it
        kind = app.producer_pool.connections.connection.transport.driver_type
        if detect_quorum_queues(app, kind)[0]:
            return {**options, "eta": None, "countdown": math.ceil(delay)}
    return options


def numbered(options: dict[str, Any]) -> dict[str, Any]:
    """
    Return the options of a message that replaces its task, with the number of replacements.

    A ticket has that number, and message protocol 1 leaves it out.

    Args:
        options: Options of Celery's ``send_task``.
    """
    number, headers = options.get(REPLACEMENTS), dict(options.get("headers") or {})
    return {**options, "headers": {**headers, REPLACEMENTS: number}} if number else options


def postponed(options: dict[str, Any], most: float) -> dict[str, Any]:
    """Return the options of a message with *most* seconds as its longest delay."""
    if delay_of(options) <= max(most, 0.0):
        return options
    return {**options, "eta": None, "countdown": max(most, 0.0)}


def retry_options(app: Celery, options: dict[str, Any], request: Context) -> dict[str, Any]:
    """
    Return the options of a retry, without what belongs to the delivery that is retried.

    Celery copies the delivery's headers into a retry, and the exchange that it was delivered from.

    Args:
        app: The app that sends the retry.
        options: Options of Celery's ``send_task``.
        request: The request of the delivery.
    """
    kept = as_sent({HEADER: dict(notes_of(request))}).get(HEADER, {})
    options = {**options, "headers": with_notes(as_sent(options.get("headers")), kept)}
    exchange, key = options.get("exchange"), options.get("routing_key")
    if isinstance(exchange, str) and isinstance(key, str) and not options.get("queue"):
        exchange, key = options["exchange"], options["routing_key"] = undelayed(exchange, key)
        was_delayed = exchange.endswith(DELAYED_DELIVERY)
        queues = app.amqp.queues.values() if was_delayed else queues_of(app, exchange)
        # A delayed message is sent to the queue that Celery has been given, or to the default one.
        for queue in queues:
            if queue.routing_key == key and queue.exchange and queue.exchange.type != "direct":
                del options["exchange"], options["routing_key"]
                return {**options, "queue": queue}
    return options
