"""Publish the messages of parked tasks whose turn it is, and end those that lost their place.

Nothing here raises a broker's error: the caller has released a lock and done its own task, and must
not fail for another's.  A turn that was not published is given back, or runs out, and is given
again.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from celery import states
from celery.app.task import Context
from celery.exceptions import TaskRevokedError
from kombu.exceptions import OperationalError
from kombu.utils.url import url_to_parts

from celery_dislock.exceptions import StoreError
from celery_dislock.keys.names import task_id_of, task_name
from celery_dislock.keys.templates import key_of
from celery_dislock.messages.headers import REPLACED_HEADER, TICKET_HEADER
from celery_dislock.messages.message import Message
from celery_dislock.messages.resend import result_is_ignored
from celery_dislock.parking.park import withdraw
from celery_dislock.redaction import reason_of
from celery_dislock.scripts.names import aside_of
from celery_dislock.servers.replies import Turn

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from celery import Celery
    from kombu.entity import Queue

    from celery_dislock.parking.store import Lines
    from celery_dislock.reporting import Order

# Transport options that name a place: two apps that differ in one have different brokers.
PLACES = (
    "global_keyprefix",
    "queue_name_prefix",
    "data_folder_out",
    "control_folder",
    "master_name",
    "region",
)

logger = logging.getLogger("celery_dislock")


class Publisher:
    """
    Publishes parked tasks' messages.

    Args:
        app: Whose broker they came from.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app

    @property
    def home(self) -> str:
        """Name the broker: the same text for all who mean the same one, or nearly so."""
        conf = self._app.conf
        urls = conf.broker_write_url or conf.broker_url or ""
        given = urls.split(";") if isinstance(urls, str) else urls
        options = conf.broker_transport_options or {}
        where = [_without_login(url) for url in given]
        where += [f"{name}={options[name]}" for name in PLACES if name in options]
        return hashlib.sha1("\n".join(where).encode(), usedforsecurity=False).hexdigest()[:12]

    def hand_over(self, lines: Lines, turns: Sequence[Turn]) -> None:
        """Publish the messages of parked tasks whose turn it is."""
        readable: list[tuple[Turn, Message]] = []
        pending = deque(turns)
        while pending:
            turn = pending.popleft()
            if turn.message is None:
                logger.error(
                    "Parked task %s has lost its message on the lock server, and cannot be run; "
                    "the next in line of %s has its turn.",
                    turn.ticket,
                    turn.lock,
                )
                continue
            try:
                message = Message.from_bytes(turn.message)
            except ValueError as exc:
                pending += _set_aside(lines, turn, exc)
                continue
            if _is_named_for(turn.ticket, message):
                readable.append((turn, message))
            else:
                pending += self._send_anew(lines, turn, message)
        for nth, (turn, message) in enumerate(readable):
            try:
                self._publish(message, {TICKET_HEADER: [turn.lock, turn.ticket]})
                logger.debug("Task %s has its turn for lock %r.", message, key_of(turn.lock))
            except (OperationalError, OSError) as exc:  # the broker is away
                _not_sent(readable[nth:], exc, _give_back(lines, readable[nth:]))
                return
            except Exception as exc:  # noqa: BLE001 -- any of the broker's client
                # The others are not to wait for this one.
                _not_sent([(turn, message)], exc, "when their turn has run out")

    def _send_anew(self, lines: Lines, turn: Turn, message: Message) -> list[Turn]:
        """Send a task without its ticket, as new work; return whose turn it is instead.

        An earlier version wrote the id into the ticket as it is, which no delivery can show.
        """
        try:
            self._publish(message, {})
            next_turns = lines.set_aside(turn.lock, turn.ticket, b"")
        except Exception as exc:  # noqa: BLE001 -- the broker's or the store's
            _not_sent([(turn, message)], exc, "when their turn has run out")
            return []
        logger.info(
            "Parked task %s was put in line for lock %r by an earlier version, and is sent as a "
            "new one: it goes to the end of the line.",
            *(message, key_of(turn.lock)),
        )
        return next_turns

    def tell_replaced(
        self, lines: Lines, lock: str, replaced: Mapping[str, bytes], order: Order
    ) -> None:
        """
        End tasks that had to make room in their line: REVOKED, as if they had been skipped.

        Others may end the same tasks at the same moment.  The process that takes one off the list
        logs it.
        """
        key = key_of(lock)
        for ticket, written in replaced.items():
            reason = f"a newer task took its place in line for lock {key!r}"
            try:
                message = Message.from_bytes(written)
            except ValueError as exc:
                self.hand_over(lines, _set_aside(lines, Turn(lock, ticket, written), exc))
                continue
            try:
                known = message.alone and message.headers.get("task") in self._app.tasks
                if known:
                    self._revoke(message, reason)
                else:  # only a worker that knows the task can read who else must be told
                    self._publish(message, {REPLACED_HEADER: reason})
                if lines.leave(lock, ticket) and known:  # else that worker logs it
                    line = f"Task {message} skipped: {reason}. It does not run."
                    order.write(ticket, partial(logger.info, "%s", line))
            except Exception as exc:  # noqa: BLE001 -- the broker's, the backend's or the store's
                logger.warning(
                    "Task %s lost its place in line for lock %r; its result will say so when the "
                    "sweep has tried again: %s",
                    *(message, key, reason_of(exc)),
                )

    def end_unclaimed(self, lines: Lines, lock: str, tickets: Sequence[str]) -> None:
        """Set tasks aside that do not claim their turns, and whose results say that they ended.

        Their queue is served, by a worker that knows nothing of their line: it drops them, fails
        them, or runs them at each turn.  Others are left alone: their queue may be slow, or be
        without a worker.
        """
        backend = self._app.backend
        for ticket in tickets:
            try:
                # Results that come by messages are not for us to take.
                state = (
                    backend.get_state(task_id_of(ticket)) if backend.persistent else states.PENDING
                )
            except NotImplementedError:  # there are no results
                return
            except Exception as exc:  # noqa: BLE001 -- any of the backend's client
                logger.warning("Could not ask for the result of parked task %s: %s", ticket, exc)
                return
            if state in states.READY_STATES:
                why = f"its result is {state}, and it does not claim its turns"
                withdraw(lines, (lock, ticket), ticket, why)

    def _publish(self, message: Message, notes: dict[str, Any]) -> None:
        with self._app.producer_or_acquire() as producer:
            # Other brokers know an exchange's kind only where it was declared.
            known = producer.connection.transport.driver_type == "amqp" or not message.exchange
            message.publish(producer, notes, () if known else self._queues(message.exchange))

    def _queues(self, exchange: str) -> list[Queue]:
        queues = self._app.amqp.queues.values()
        return [one for one in queues if one.exchange is not None and one.exchange.name == exchange]

    def _revoke(self, message: Message, reason: str) -> None:
        headers = message.headers
        task = self._app.tasks[headers["task"]]
        request = Context(headers)
        task.backend.mark_as_failure(
            headers["id"],
            TaskRevokedError(reason),
            request=request,
            store_result=not result_is_ignored(task, request),
            call_errbacks=False,
            state=states.REVOKED,
        )


def _is_named_for(ticket: str, message: Message) -> bool:
    """Tell whether a delivery of the message can show the ticket."""
    task_id = message.headers.get("id")  # of Celery's first protocol the body has it
    return not task_id or ticket.startswith(f"{task_name(task_id)}:")


def _not_sent(turns: Iterable[tuple[Turn, Message]], error: Exception, again: str) -> None:
    logger.warning(
        "Parked tasks have their turn, but could not be sent to their queue, and will be sent "
        "again %s: %s: %s",
        again,
        ", ".join(f"{message} for lock {key_of(turn.lock)!r}" for turn, message in turns),
        reason_of(error),
    )


def _give_back(lines: Lines, turns: Iterable[tuple[Turn, Message]]) -> str:
    """Let the next sweep try again, before the turns run out; return when they are sent again."""
    try:
        for turn, _ in turns:
            lines.give_back(turn.lock, turn.ticket)
    except StoreError as exc:
        return f"when their turns have run out, as the lock server is away, too ({exc})"
    return "by the next sweep"


def _set_aside(lines: Lines, turn: Turn, error: Exception) -> list[Turn]:
    """Report a task that cannot be run; return whose turn it is instead."""
    next_turns: list[Turn] = []
    where = f"is set aside in {aside_of(turn.lock)}"
    if turn.message:  # else it is there already
        try:
            next_turns = lines.set_aside(turn.lock, turn.ticket, turn.message)
        except StoreError as exc:
            where = f"stays in line until the lock server answers ({exc})"
    logger.error(
        "Parked task %s for lock %r cannot be run, and %s: %s",
        *(turn.ticket, key_of(turn.lock), where, error),
    )
    return next_turns


def _without_login(url: str) -> str:
    parts = url_to_parts(url)
    path = parts.query.get("virtual_host", parts.path) or ""
    return f"{parts.scheme}://{parts.hostname or ''}:{parts.port or ''}/{parts.path or ''}#{path}"
