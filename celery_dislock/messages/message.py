"""A task's message as it came, kept as bytes and published again to where it came from.

What is kept is ours: a line of JSON about the message, and after it the message's body, byte for
byte.  Nothing of the body is ever decoded here.
"""

from __future__ import annotations

import math
import reprlib
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from celery.exceptions import Ignore
from kombu.utils.json import dumps, loads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from celery.app.task import Context
    from celery.worker.request import Request
    from kombu.entity import Queue
    from kombu.messaging import Producer

FORMAT = b"1 "
AS_IT_CAME = "dislock_message"  # key in a delivery's info, from the worker to its pool process
# What a message may say of itself beside its headers, and has the same meaning a second time.
PROPERTIES = ("correlation_id", "reply_to", "message_id", "type", "app_id", "timestamp")
DEAD_LETTER = ("x-death", "x-first-death", "x-last-death")  # headers by which RabbitMQ sees cycles
RETRY = {"max_retries": 1, "interval_start": 0}  # an idle connection may have been cut


class TaskParked(Ignore):  # type: ignore[misc]
    """Ends a delivery whose task is in line.

    Attributes:
        key: The key of the lock.
        place: In line, counted from 1.
        holder: Who holds the lock, in words.
    """

    def __init__(self, key: str, place: int, holder: str) -> None:
        super().__init__(key, place, holder)
        self.key = key
        self.place = place
        self.holder = holder

    def __str__(self) -> str:
        return f"parked: place {self.place} in line for lock {self.key!r}, held by {self.holder}"


@dataclass(frozen=True)
class Message:
    """
    A task's message as it came.

    Attributes:
        exchange, routing_key: Where it was published.
        headers: Its headers, without our notes.
        content_type, content_encoding: Of the body.
        properties: Those of its properties that are worth keeping.
        alone: Whether nobody but its own result waits for the task: no chord, no rest of a chain.
        body: Its body, uncompressed.
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
        """Name the task as Celery's log does."""
        return f"{self.headers.get('task')}[{self.headers.get('id')}]"

    @classmethod
    def of(cls, request: Context) -> Message | None:
        """Return the message of a delivery; None where nobody kept it, as for an eager one."""
        info = request.delivery_info or {}
        if AS_IT_CAME not in info:
            return None
        headers, content_type, content_encoding, body = info[AS_IT_CAME]
        if isinstance(body, str):
            body = body.encode(content_encoding or "utf-8")
        return cls(
            exchange=info.get("exchange") or "",
            routing_key=info.get("routing_key") or "",
            headers={
                name: value
                for name, value in headers.items()
                if not name.startswith(("dislock_", *DEAD_LETTER))
            },
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

    def to_bytes(self) -> bytes:
        """Write the message down."""
        about = {name: value for name, value in vars(self).items() if name != "body"}
        header: str = dumps(about, default_kwargs={"separators": (",", ":")})
        return b"".join((FORMAT, header.encode(), b"\n", self.body))

    @classmethod
    def from_bytes(cls, written: bytes) -> Message:
        """
        Read a message that was written down.

        Raises:
            ValueError: It is damaged, or of a format that this version does not know.
        """
        if not written:
            raise ValueError("the record of its ticket cannot be read")
        about, newline, body = written.partition(b"\n")
        if not about.startswith(FORMAT) or not newline:
            raise ValueError(f"it begins with {written[:20]!r}, which is no format known here")
        try:
            message = cls(**loads(about[len(FORMAT) :]), body=body)
        except Exception as exc:  # whatever it holds that is none of ours
            raise ValueError(f"it cannot be read: {exc!r}") from exc
        texts, tables = (
            (message.exchange, message.routing_key),
            (message.headers, message.properties),
        )
        if not all(isinstance(one, str) for one in texts) or not all(
            isinstance(one, dict) for one in tables
        ):
            raise ValueError("its exchange, routing key, headers or properties are of a wrong type")
        if not all(isinstance(message.headers.get(name, ""), str) for name in ("id", "task")):
            raise ValueError("its id or its task is no text")
        wrong = [one for one in message.properties.items() if not _can_be_sent(*one)]
        if wrong:
            raise ValueError(f"it cannot be sent with {reprlib.repr(wrong[0])}")
        return message

    def publish(
        self, producer: Producer, notes: dict[str, Any], declare: Sequence[Queue] = ()
    ) -> None:
        """
        Publish the message to where it came from.

        Args:
            producer: Of the broker that it came from.
            notes: Headers for the next delivery.
            declare: Queues to declare first.

        Raises:
            Exception: Of the broker's client: it is away, or refuses.
        """
        about = dict(self.properties)
        expiration = about.pop("expiration", None)
        headers = {**self.headers, **notes}
        producer.publish(
            self.body,
            exchange=self.exchange,
            routing_key=self.routing_key,
            headers=headers,
            content_type=self.content_type,
            content_encoding=self.content_encoding,
            compression=headers.pop("compression", None),
            expiration=None if expiration is None else float(expiration) / 1000,
            priority=about.pop("priority", None),
            delivery_mode=about.pop("delivery_mode", None),
            declare=list(declare),
            retry=True,
            retry_policy=RETRY,
            **about,
        )


def _can_be_sent(name: str, value: Any) -> bool:
    """Tell whether a broker takes a property; who sends to Redis can make it anything."""
    if name == "expiration":
        try:
            return 0 <= float(value) < math.inf
        except (TypeError, ValueError):
            return False
    if name in {"priority", "delivery_mode"}:
        return isinstance(value, int)
    if name == "timestamp":
        return isinstance(value, (int, float, datetime))
    return name not in PROPERTIES or isinstance(value, str)


def keep_message(request: Request) -> None:
    """Let the pool process have the message as it came, beside what Celery makes of it."""
    message = request.message
    as_it_came = (
        dict(message.headers),
        message.content_type,
        message.content_encoding,
        message.body,
    )
    # A copy: what the worker shows of its tasks need not have the body in it.
    request.request_dict["delivery_info"] = {**request.delivery_info, AS_IT_CAME: as_it_came}
