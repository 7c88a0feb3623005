"""A task's message as received: stored as bytes, and published again as its sender made it.

Brokers add to a message that they deliver.  RabbitMQ adds headers that say where the message was
dead-lettered and how often it was delivered, and drops a message that by these headers seems to go
round in circles.  Its delayed delivery puts the delay before the routing key.  All of that is taken
off.

The stored format is one line of JSON about the message, followed by the message's body, byte for
byte.  The body is never deserialized here.  The line begins with what scripts read of the message,
so they never look into its headers, which anybody may have written.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any

from celery import states
from celery.exceptions import Ignore
from kombu.utils.json import dumps, loads

from celery_dislock.messages.broker import answer_within
from celery_dislock.messages.headers import HEADER, REPLACED, as_sent, for_scripts, with_notes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from celery import Task
    from celery.app.task import Context
    from celery.worker.request import Request
    from kombu.entity import Queue
    from kombu.messaging import Producer

FORMAT = b"1 "
AS_IT_CAME = "dislock_message"  # key in delivery_info, from the worker to its pool process
# Message properties that are still valid when the message is published a second time.  The last one
# is of SQS, whose deduplication id is not: SQS would drop the second message.
PROPERTIES = ("correlation_id", "reply_to", "message_id", "type", "app_id", "MessageGroupId")
# The exchanges of delayed delivery: a message comes from the last one that has delayed it.
DELAYED_BY = re.compile(r"celery_delayed_[0-9]+$")
DELAYED_DELIVERY = "celery_delayed_delivery"  # end of the name of the exchange to all queues
DELAY = re.compile(r"(?:[01]\.){28}")  # before a routing key; longer with each resend by kombu 5.5
OCTET_MOST = 255  # maximum of a priority, which is one byte in AMQP


class TaskSkipped(Ignore):  # type: ignore[misc]
    """Ends a delivery whose task does not run, and whose result is REVOKED.

    Attributes:
        why: Why the task does not run.
    """

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class TaskParked(Ignore):  # type: ignore[misc]
    """Ends a delivery whose task was parked.

    Attributes:
        about: The fields of the task's event: the key of the lock, the place in line, counted from
            1, a description of the lock's holder, and for how long that has held it, if known.
        replaced: Why the tasks end that this one has replaced in line, by their ids.
        told: Holders that must end for this task, whose workers are still to be told.
    """

    about: Mapping[str, Any] = {}
    replaced: Mapping[str, str] = {}
    told: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Message:
    """
    A task's message as received.

    Attributes:
        exchange, routing_key: Where the message was published, without a delay.
        headers: The headers, without the notes of one delivery and without the broker's.
        content_type, content_encoding: Content type and encoding of the body.
        properties: The properties that are published again.
        alone: Whether the task has no chord, and no next step of a chain.
        body: The body, uncompressed.
    """

    exchange: str
    routing_key: str
    headers: dict[str, Any]
    content_type: str | None
    content_encoding: str | None
    properties: dict[str, Any]
    alone: bool
    body: bytes = field(repr=False)

    def __str__(self) -> str:
        """Name the task as in Celery's log."""
        return f"{self.headers.get('task')}[{self.headers.get('id')}]"

    @classmethod
    def of(cls, request: Context, as_it_came: Any) -> Message:
        """Return the message of a delivery, from what :func:`keep_message` has kept."""
        info = request.delivery_info
        headers, content_type, content_encoding, body, *queue = as_it_came
        exchange, routing_key = undelayed(info.get("exchange"), info.get("routing_key"))
        if queue:
            exchange, [routing_key] = "", queue
        if isinstance(body, str):
            body = body.encode(content_encoding or "utf-8")
        return cls(
            exchange=exchange,
            routing_key=routing_key,
            headers=as_sent(headers),
            content_type=content_type,
            content_encoding=content_encoding,
            properties={
                name: value
                for name in (*PROPERTIES, "priority", "delivery_mode", "expiration")
                if _can_be_sent(name, value := (request.properties or {}).get(name))
            },
            alone=not (request.chord or request.chain),
            body=bytes(body),
        )

    def to_bytes(self, notes: Mapping[str, Any] | None = None) -> bytes:
        """Serialize the message, with these notes."""
        headers = with_notes(self.headers, notes or {})
        sent, until = for_scripts(headers)
        about = {"sent": sent, "until": until, **vars(self), "headers": headers}
        body = about.pop("body")
        header: str = dumps(about, default_kwargs={"separators": (",", ":")})
        return b"".join((FORMAT, header.encode(), b"\n", body))

    @classmethod
    def from_bytes(cls, written: bytes) -> Message:
        """
        Deserialize a message.

        Raises:
            ValueError: The bytes are damaged.
        """
        if not written:
            raise ValueError("the record of its ticket cannot be read")
        about, newline, body = written.partition(b"\n")
        version, space, header = about.partition(b" ")
        if not (version.isdigit() and space and newline):
            raise ValueError(f"it begins with {written[:20]!r}, which is not a known format")
        try:  # a later version has more members
            members = loads(header)
            if REPLACED in members:  # drop.lua has put it there
                notes = {REPLACED: members[REPLACED]}
                members["headers"] = with_notes(members["headers"], notes)
            known = {name: value for name, value in members.items() if name in FIELDS}
            message = cls(**known, body=body)
            named = [message.headers.get(name, "") for name in ("id", "task")]
            texts = (message.exchange, message.routing_key, *named)
            can_be_sent = [_can_be_sent(*item) for item in message.properties.items()]
        except Exception as exc:  # any malformed content
            raise ValueError(f"it cannot be read: {exc!r}") from exc
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("its exchange, routing key, id or task name is not text")
        if not all(can_be_sent):
            raise ValueError("it has a property that no broker accepts")
        return message

    def publish(
        self,
        producer: Producer,
        notes: Mapping[str, Any],
        declare: Sequence[Queue] = (),
        **delayed: Any,
    ) -> None:
        """
        Publish the message again, to the exchange and routing key that it came from.

        Args:
            producer: A producer for the broker that the message came from.
            notes: Notes to add for the next delivery.
            declare: Queues to declare first.
            delayed: Options that delay the message, in place of its own.

        Raises:
            Exception: Any error of the broker's client: the broker is away, or refused the message.
        """
        about = dict(self.properties)
        expiration = about.pop("expiration", None)
        headers = with_notes(self.headers, notes)
        headers.update(delayed.pop("headers", {}))
        options = {
            "exchange": self.exchange,
            "routing_key": self.routing_key,
            "compression": headers.pop("compression", None),
            "expiration": None if expiration is None else float(expiration) / 1000,
            "priority": about.pop("priority", None),
            "delivery_mode": about.pop("delivery_mode", None),
            **delayed,
        }
        producer.publish(
            self.body,
            headers=headers,
            content_type=self.content_type,
            content_encoding=self.content_encoding,
            declare=list(declare),
            **options,
            **about,
        )


FIELDS = {field.name for field in fields(Message)} - {"body"}  # of the stored message's first line


def undelayed(exchange: str | None, routing_key: str | None) -> tuple[str, str]:
    """Return the exchange and routing key without a delay, given those that a message came from."""
    exchange, routing_key = exchange or "", routing_key or ""
    while found := DELAY.match(routing_key):
        routing_key = routing_key[found.end() :]
        exchange = DELAYED_BY.sub(DELAYED_DELIVERY, exchange)
    return exchange, routing_key


def _can_be_sent(name: str, value: Any) -> bool:
    """Tell whether a broker accepts a property; a message in Redis may contain any value."""
    if name == "expiration":
        try:
            return 0 <= float(value) < math.inf
        except (TypeError, ValueError, OverflowError):
            return False
    if name in {"priority", "delivery_mode"}:
        return isinstance(value, int) and 0 <= value <= OCTET_MOST
    return name not in PROPERTIES or isinstance(value, str)


def keep_message(request: Request, *queue: str) -> None:
    """
    Pass the message as received to the pool process, in the request's ``delivery_info``.

    If a *queue* is given, the message is published to that again, and not to its exchange.

    This adds little to what is sent to the pool process: pickle writes an object once that the
    request has already, such as the body.
    """
    message = request.message
    as_it_came = (
        dict(message.headers),
        message.content_type,
        message.content_encoding,
        message.body,
        *queue,
    )
    # A copy of delivery_info: what `celery inspect` shows of the request must not contain the body.
    request.request_dict["delivery_info"] = {**request.delivery_info, AS_IT_CAME: as_it_came}
    # In message protocol 1, Celery does not always put the message's headers there.
    if HEADER in as_it_came[0]:
        request.request_dict[HEADER] = as_it_came[0][HEADER]


def result_is_ignored(task: Task, request: Context) -> bool:
    """Tell whether the result of a delivery is not stored."""
    ignores: Any = vars(request).get("ignore_result")  # not Context's class attribute False
    return bool(task.ignore_result if ignores is None else ignores)


def error_is_stored(task: Task, request: Context) -> bool:
    """Tell whether the result of a delivery is stored if it is an error."""
    return bool(task.store_errors_even_if_ignored) or not result_is_ignored(task, request)


class _ByGuard:
    """The value of ``track_started`` with which Celery does not store STARTED, and a guard does."""

    def __bool__(self) -> bool:
        return False


BY_GUARD = _ByGuard()


def tracks_start(task: Task | type[Task]) -> bool:
    """Tell whether the state STARTED is stored for a task, by Celery or by its guard."""
    return bool(task.track_started) or task.track_started is BY_GUARD


def store_started(task: Task, request: Context) -> None:
    """
    Store STARTED as Celery does, but when the body begins.

    Celery stores it before it calls the task, so a copy would overwrite how its task has ended.

    Raises:
        Exception: Any error of the result backend's client.
    """
    if not (request.is_eager or result_is_ignored(task, request)):
        meta = {"pid": os.getpid(), "hostname": request.hostname}
        task.backend.store_result(request.id, meta, states.STARTED, request=request)


def store_end(
    task: Task,
    request: Context,
    error: Exception,
    state: str,
    *,
    call_errbacks: bool = False,
    within: float | None = None,
) -> None:
    """Store how a task ends, and notify its chord and the rest of its chain.

    Celery does neither for a task that ends with Ignore.

    Args:
        task: The task.
        request: Its delivery that ends.
        error: Why it ends, for its result.
        state: Its last state.
        call_errbacks: Whether to call its errbacks, too.
        within: Seconds to wait for the result backend; None: for as long as its client does.

    Raises:
        Exception: Any error of the result backend's client; TimeoutError: no answer in time.
    """
    store = partial(  # a thread would have a backend of its own
        task.backend.mark_as_failure,
        request.id,
        error,
        request=request,
        store_result=error_is_stored(task, request),
        call_errbacks=call_errbacks,
        state=state,
    )
    if within is None:
        store()
    else:
        answer_within(within, store)
