"""The queues of an app that a message reaches, by its exchange and its routing key.

An exchange may copy a message to several queues.  All copies have one id, so all but the first are
put off.  If each of those went to the exchange again, it would be copied again, and the messages
would multiply.  So they go to one of the queues alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from celery.utils.quorum_queues import detect_quorum_queues

from celery_dislock.messages.message import DELAYED_DELIVERY

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from celery import Celery
    from celery.worker.request import Request
    from kombu.entity import Queue

    from celery_dislock.messages.message import Message


def is_broadcast(app: Celery, exchange: str) -> bool:
    """Tell whether an exchange copies each message to all workers, as that of a ``Broadcast``."""
    return any(queue.exchange.type == "fanout" for queue in queues_of(app, exchange))


def queues_of(app: Celery, exchange: str) -> list[Queue]:
    """Return those of the app's queues that are bound to an exchange."""
    queues = app.amqp.queues.values()
    return [
        queue for queue in queues if queue.exchange is not None and queue.exchange.name == exchange
    ]


def reached(
    app: Celery, exchange: str, routing_key: str, headers: Mapping[str, Any] | None = None
) -> list[Queue]:
    """
    Return those of the app's queues that get a message.

    Args:
        app: The app.
        exchange: The message's exchange; that of delayed delivery leads to those of all queues.
        routing_key: The message's routing key, without a delay.
        headers: The message's headers; None: they are not known, and may lead anywhere.
    """
    is_delayed = exchange.endswith(DELAYED_DELIVERY)
    # For delayed delivery, Celery binds each queue a second time.
    bound_twice = is_delayed or detect_quorum_queues(app, "amqp")[0]
    words = routing_key.split(".")

    def leads(bound: Any, *, twice: bool) -> bool:
        of, key = bound.exchange, bound.routing_key or ""
        if of is None:
            return False
        if of.type == "direct":
            return bool(of.name == exchange and key == routing_key)
        if not is_delayed and of.type == "headers":
            return bool(of.name == exchange) and _asked_for(_arguments_of(bound), headers)
        if not is_delayed and (of.name != exchange or of.type != "topic"):
            return bool(of.name == exchange)
        keys = [key, f"#.{key}"] if twice else [key]
        return any(_fits(pattern.split("."), words) for pattern in keys)

    def gets(queue: Queue) -> bool:
        others = () if is_delayed else queue.bindings or ()
        return leads(queue, twice=bound_twice) or any(
            leads(binding, twice=False) for binding in others
        )

    return [queue for queue in app.amqp.queues.values() if gets(queue)]


def to_one_queue(app: Celery, message: Message) -> Message:
    """
    Return a message as sent to one of the queues that got it, from which this process consumes.

    A message that has reached one queue alone stays as it is, and so does one that was broadcast.
    """
    if is_broadcast(app, message.exchange):
        return message
    queues = reached(app, message.exchange, message.routing_key, message.headers)
    here = _consumed(app, queues)
    if len(queues) < 2 or not here:  # noqa: PLR2004 -- several
        return message
    return replace(message, exchange="", routing_key=here[0])


def known_here(app: Celery, request: Request) -> list[str]:
    """
    Return the queue to which a message must go again, as other processes do not know its exchange.

    With brokers other than AMQP's, who publishes has to know the type of an exchange.  Only the
    main process knows those of queues that a worker was told later to consume from.
    """
    exchange, routing_key = map(request.delivery_info.get, ("exchange", "routing_key"))
    if not (exchange and hasattr(request.message.channel, "typeof")):
        return []
    later = [queue for queue in queues_of(app, exchange) if queue.exchange.type == "topic"]
    if not later or any(queue.name in _configured(app) for queue in later):
        return []
    return _consumed(app, reached(app, exchange, str(routing_key or "")))[:1]


def _configured(app: Celery) -> set[str]:
    queues = app.conf.task_queues or ()
    return {queue if isinstance(queue, str) else queue.name for queue in queues}


def _consumed(app: Celery, queues: Sequence[Queue]) -> list[str]:
    return [queue.name for queue in queues if queue.name in app.amqp.queues.consume_from]


def _arguments_of(bound: Any) -> Mapping[str, Any]:
    """Return the arguments of a binding, or of a queue's own one."""
    found = getattr(bound, "binding_arguments", None) or getattr(bound, "arguments", None)
    return found or {}


def _asked_for(wanted: Mapping[str, Any], headers: Mapping[str, Any] | None) -> bool:
    """Tell whether a headers exchange takes a message's headers for those of a binding."""
    if headers is None:
        return True
    match = str(wanted.get("x-match", "all"))
    there = [
        name in headers and value in (None, headers[name])
        for name, value in wanted.items()
        if name != "x-match" and (match.endswith("-with-x") or not name.startswith("x-"))
    ]
    return any(there) if match.startswith("any") else all(there)


def _fits(pattern: Sequence[str], words: Sequence[str]) -> bool:
    """Tell whether a topic exchange takes these words of a routing key for those of a binding."""
    if not pattern:
        return not words
    first, *others = pattern
    if first == "#":
        return _fits(others, words) or (bool(words) and _fits(pattern, words[1:]))
    return bool(words) and first in {"*", words[0]} and _fits(others, words[1:])
