"""Publish the messages of parked tasks that have their turn, and end tasks that were replaced.

Errors of the broker are logged here, not raised.  The caller has run its own task and released the
lock, and must not fail because of another task.  If a message could not be published, its turn is
given back or runs out, and the task gets another turn.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from celery import states
from celery.app.task import Context
from celery.exceptions import InvalidTaskError, TaskRevokedError
from kombu.exceptions import OperationalError
from kombu.utils.url import url_to_parts

from celery_dislock.clock import monotonic
from celery_dislock.config.censoring import refused
from celery_dislock.exceptions import StoreError
from celery_dislock.keys.names import task_id_of
from celery_dislock.keys.templates import key_of
from celery_dislock.messages.broker import BACKEND_WITHIN, Rest, answer_within
from celery_dislock.messages.headers import REPLACED, TICKET, notes_in, readable_reason
from celery_dislock.messages.message import Message, store_end
from celery_dislock.messages.resending import publish
from celery_dislock.messages.unrun import EARLY_LEAST, store_unrunnable
from celery_dislock.parking.answers import PARKED
from celery_dislock.parking.store import UNREAD, log_unrunnable
from celery_dislock.redaction import reason_of
from celery_dislock.scripts import HAS_LEFT
from celery_dislock.words import plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from celery import Celery

    from celery_dislock.parking.store import Lines
    from celery_dislock.servers.replies import Turn

# Transport options that select a broker: apps that differ in one of them have different brokers.
BROKER_OPTIONS = (
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
    Publishes the messages of parked tasks.

    The sweep waits for the result backend in the event loop of a worker: for a bounded time, and
    after an error that was slow in coming not at all for a while.

    Args:
        app: The app whose broker the messages came from.
        lines: The parked tasks of this broker.
    """

    def __init__(self, app: Celery, lines: Lines) -> None:
        self._app, self.lines = app, lines
        self._rest = Rest()  # of the result backend

    def hand_over(self, turns: Sequence[Turn]) -> None:
        """Publish the messages of parked tasks that have their turn."""
        readable: list[tuple[Turn, Message]] = []
        unreadable: list[tuple[str, str, object]] = []
        pending = deque(turns)
        while pending:
            turn = pending.popleft()
            lock, ticket, written, _ = turn
            if written is None:
                #: ERROR: A failover lost its record, or somebody deleted it. -> Send the task
                #: again, if you still want it.
                logger.error(
                    "Parked task %s cannot be run: its message is gone from the lock server. The "
                    "next task in line for %s has its turn.",
                    *(ticket, lock),
                )
                unreadable.append((lock, ticket, "its message is gone from the lock server"))
                continue
            try:
                readable.append((turn, Message.from_bytes(written)))
            except ValueError as exc:
                lines = self.lines.handing_to(pending.extend)
                if not written:  # the script has set it aside
                    log_unrunnable(ticket, lock, exc)
                elif not lines.take_out((lock, ticket), exc):
                    continue
                unreadable.append((lock, ticket, exc))
        self._publish(readable)
        for lock, ticket, error in unreadable:
            self._fail(lock, ticket, error)

    def _publish(self, readable: Sequence[tuple[Turn, Message]]) -> None:
        for nth, (turn, message) in enumerate(readable):
            try:
                delay = turn.delay and max(turn.delay, EARLY_LEAST)
                publish(self._app, message, {TICKET: [turn.lock, turn.ticket]}, delay=delay)
                logger.debug("Task %s has its turn for lock %r.", message, key_of(turn.lock))
            except (OperationalError, OSError) as exc:  # the broker is away
                _not_sent(readable[nth:], exc, _give_back(self.lines, readable[nth:]))
                return
            except Exception as exc:  # noqa: BLE001 -- any of the broker's client
                # The error may concern this message alone: go on with the others.
                _not_sent([(turn, message)], exc, "when their turn has run out")

    def _fail(self, lock: str, ticket: str, why: object) -> None:
        """
        Let the result of a task whose message nobody can read say so, unless it says otherwise.

        Its chord, its chain and its reservation stand in that message.
        """
        if self._ask(ticket) != PARKED:
            return
        began, key = monotonic(), key_of(lock)
        error = InvalidTaskError(f"it was parked for lock {key!r}, and cannot be run: {why}")
        if not store_unrunnable(self._app, Context(id=task_id_of(ticket)), error):
            self._rest.after(began)

    def tell_replaced(
        self,
        lock: str,
        replaced: Mapping[str, bytes],
        by: str = "",
        *,
        within: float | None = None,
    ) -> dict[str, str]:
        """
        End tasks that were replaced by newer ones in the line of this lock, as REVOKED.

        A message that an operator has dropped brings another reason with it.  Several processes may
        end the same task at the same moment.  The process that removes its ticket logs the end.

        Args:
            lock: Name of the lock in Redis.
            replaced: Their messages, by ticket.
            by: Id of the task that took their places; empty: it is not known here.
            within: Seconds to wait for the result backend each time; None: for as long as it does.

        Returns:
            Why they end, by task id, for the tasks that were logged here.  The caller sends an
            event for each.
        """
        key = key_of(lock)
        newer = f"a newer task took its place in line for lock {key!r}"
        newer += f": task {plain(by)}" if by else ""
        ended: dict[str, str] = {}
        for ticket, written in replaced.items():
            began = monotonic()
            if began < self._rest.until:
                break
            try:
                message = Message.from_bytes(written)
            except ValueError as exc:
                if self.lines.take_out((lock, ticket), exc, how=UNREAD):
                    self._fail(lock, ticket, exc)
                continue
            try:
                reason = readable_reason(notes_in(message.headers).get(REPLACED)) or newer
                task = self._app.tasks.get(message.headers.get("task"))
                known = message.alone and task is not None
                if known:
                    # The properties say where a caller waits, if results are sent as messages.
                    request = Context({**message.headers, **message.properties})
                    end = task, request, TaskRevokedError(reason), states.REVOKED
                    store_end(*end, within=within)
                else:  # a worker that knows the task notifies its chord and chain
                    publish(self._app, message, {REPLACED: reason})
                if self.lines.leave(lock, ticket) == HAS_LEFT and known:  # else that worker logs it
                    #: INFO `Task … skipped: a newer task took its place in line for lock …. It does
                    #: not run.`: The line was full, with `lock_queue_overflow="replace"`.
                    #: INFO `Task … skipped: dropped by an operator from the line for lock …. It
                    #: does not run.`: Somebody used `celery dislock drop`, the page or Python.
                    logger.info("Task %s skipped: %s. It does not run.", message, reason)
                    ended[message.headers["id"]] = reason
            except Exception as exc:  # noqa: BLE001 -- the broker's, the backend's or the store's
                self._rest.after(began)
                #: WARNING: The broker, the result backend or the lock server is away. -> Repair it.
                logger.warning(
                    "Task %s lost its place in line for lock %r; its result will say so when the "
                    "sweep has tried again: %s",
                    *(message, key, reason_of(exc)),
                )
        return ended

    def end_unclaimed(self, lock: str, tickets: Sequence[str]) -> None:
        """Set aside parked tasks that do not claim their turns and whose results say they ended.

        A worker that knows nothing of the line serves their queue.  It drops, fails or runs such a
        task at each turn.  Tasks without a final state are left in line: their queue may be slow
        or have no worker.
        """
        # At random, so that a task whose result cannot be asked for keeps no other in line.
        for ticket in random.sample(tickets, len(tickets)):
            state = self._ask(ticket)
            if state is None:
                return
            if state in states.READY_STATES:
                why = f"its result is {state}, and it does not claim its turns"
                self.lines.take_out((lock, ticket), why)

    def waits_again(self, lock: str, ticket: str) -> None:
        """Store PARKED for a task that is put back, if its result says that it has ended."""
        if self._ask(ticket) not in states.READY_STATES:
            return
        began, meta = monotonic(), {"key": key_of(lock), "place": 0, "holder": ""}
        try:
            store = partial(self._app.backend.store_result, task_id_of(ticket), meta, PARKED)
            answer_within(BACKEND_WITHIN, store)
        except Exception as exc:  # noqa: BLE001 -- any of the backend's client
            self._rest.after(began)
            #: WARNING: The result backend is away; a sweep may set it aside again. -> Repair the
            #: backend.
            logger.warning(
                "Parked task %s is put back, and its result does not say so: %s",
                *(ticket, reason_of(exc)),
            )

    def _ask(self, ticket: str) -> str | None:
        """Return the state of a parked task's result; None: it cannot be asked for."""
        backend, began = self._app.backend, monotonic()
        if began < self._rest.until:
            return None
        try:
            # Reading a result that is sent as a message would consume it.
            if not backend.persistent:
                return str(states.PENDING)
            return str(
                answer_within(BACKEND_WITHIN, partial(backend.get_state, task_id_of(ticket)))
            )
        except NotImplementedError:  # the app stores no results
            return None
        except Exception as exc:  # noqa: BLE001 -- any of the backend's client
            self._rest.after(began)
            #: WARNING: No worker claims its turns, or its message is damaged, and the result
            #: backend is away. A later sweep asks again for those in line. -> Repair the backend.
            logger.warning(
                "Could not ask for the result of parked task %s: %s", ticket, reason_of(exc)
            )
            return None


def _not_sent(turns: Iterable[tuple[Turn, Message]], error: Exception, again: str) -> None:
    #: WARNING: The process that released the lock cannot reach the broker; the line names each task
    #: and its lock. -> Repair the broker.
    logger.warning(
        "Parked tasks have their turn, but could not be sent to their queue, and will be sent "
        "again %s: %s: %s",
        again,
        ", ".join(f"{message} for lock {key_of(turn.lock)!r}" for turn, message in turns),
        reason_of(error),
    )


def _give_back(lines: Lines, turns: Iterable[tuple[Turn, Message]]) -> str:
    """Give back turns for the next sweep; return, for the log, when they are sent again."""
    try:
        for turn, _ in turns:
            lines.give_back(turn.lock, turn.ticket)
    except StoreError as exc:
        return f"when their turns have run out, as the lock server is away, too ({exc})"
    return "by the next sweep"


def broker_digest(app: Celery) -> str:
    """Return a digest of the broker's URL; different spellings of one host give different ones."""
    urls = app.conf.broker_write_url or app.conf.broker_url or ""
    given = urls.split(";") if isinstance(urls, str) else urls
    options = app.conf.broker_transport_options or {}
    where = [_without_login(url) for url in given]
    where += [f"{name}={options[name]}" for name in BROKER_OPTIONS if name in options]
    return hashlib.sha1("\n".join(where).encode(), usedforsecurity=False).hexdigest()[:12]


def _without_login(url: str) -> str:
    try:
        parts = url_to_parts(url)
    except ValueError:  # its message quotes the bad port, which may be a password
        raise refused("app.conf", "broker_url", url, "a port is not a number") from None
    path = parts.query.get("virtual_host", parts.path) or ""
    return f"{parts.scheme}://{parts.hostname or ''}:{parts.port or ''}/{parts.path or ''}#{path}"
