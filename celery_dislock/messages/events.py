"""Celery's events about what happens to a running task's lock, for those who watch the workers.

How a delivery ends is told by the worker's main process, which hears of it anyway; see
:mod:`celery_dislock.tasks.request`.  That a lock is lost, or its cap reached, is known where the
task runs: in a pool process, in the watchdog's thread.  These events are sent from a thread of
their own, so that a broker that is away delays neither the renewals nor the task.  They are few.

Whether somebody wants events is known in the main process, and may change while it runs: Flower
turns them on.  So the main process writes it into a byte that it shares with its pool processes.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from socket import gethostname
from typing import TYPE_CHECKING, Any, NamedTuple

from celery import states

from celery_dislock.redaction import reason_of
from celery_dislock.words import finite

if TYPE_CHECKING:
    import mmap
    from collections.abc import Mapping

    from celery import Celery
    from celery.events.dispatcher import EventDispatcher

WAITING_MOST = 100  # events that wait for the broker; then the oldest is dropped
BROKER_WITHIN = 2.0  # seconds for a command to reach the broker
GROUP = "task"  # of events, as Celery groups them by the start of their names

logger = logging.getLogger("celery_dislock")


class Event(NamedTuple):
    """An event, and the name of the worker that sends it."""

    type: str
    worker: str
    fields: Mapping[str, Any]


class Events:
    """
    Sends the events of one app's tasks from this process and from its pool processes.

    Args:
        app: The app.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._wanted: mmap.mmap | None = None  # a byte, shared with the pool processes
        self._followed: EventDispatcher | None = None
        self._pid = 0
        self._forget()

    def _forget(self) -> None:
        """Begin anew in this process: threads do not survive a fork."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._followed = None
            self._mutex = threading.RLock()
            self._thread: threading.Thread | None = None
            self._waiting: deque[Event] = deque(maxlen=WAITING_MOST)

    def share(self) -> None:
        """Prepare to tell pool processes whether events are wanted; call it before they start."""
        if self._wanted is None:
            import mmap  # noqa: PLC0415 -- the main process of a worker alone needs it

            self._wanted = mmap.mmap(-1, 1)

    def follow(self, dispatcher: EventDispatcher | None) -> None:
        """Use the dispatcher of the worker's main process in this process."""
        self._forget()
        self._followed = dispatcher
        self.look()

    def look(self) -> None:
        """Tell the pool processes whether events are wanted now; does not block."""
        if self._wanted is not None:
            self._wanted[0] = sends(self._followed)

    @property
    def wanted(self) -> bool:
        """Whether the worker sends events about tasks; False outside of a worker."""
        self._forget()
        if self._followed is not None:
            return sends(self._followed)
        return self._wanted is not None and self._wanted[0] == 1

    def send(self, type_: str, worker: str, **fields: Any) -> None:
        """
        Send an event about a task if events are wanted.  Does not block, and raises nothing.

        An event that cannot be sent is logged at level DEBUG.  The dispatcher of a worker with an
        event loop keeps events for the loop to send; others get a thread.  A thread must not run
        while the main process forks.

        Args:
            type_: Type of the event, such as ``task-lock-lost``.
            worker: Name of the worker that runs the task.
            fields: Fields of the event; ``uuid`` is the task's id.
        """
        try:
            if not self.wanted:
                return
            fields = finite(fields)
            followed = self._followed
            if followed is not None and GROUP in followed.buffer_group:
                followed.send(type_, **fields)
                return
            with self._mutex:
                self._waiting.append(Event(type_, worker, fields))
                if self._thread is None or not self._thread.is_alive():
                    self._thread = threading.Thread(
                        target=self._send_all, name="dislock-events", daemon=True
                    )
                    self._thread.start()
        except Exception as exc:  # noqa: BLE001 -- no thread can be started, at the end of a process
            logger.debug("Event %s was not sent: %s", type_, reason_of(exc))

    def _send_all(self) -> None:
        while True:
            with self._mutex:
                if not self._waiting:
                    self._thread = None
                    return
                event = self._waiting.popleft()
            try:
                self._send(event)
            except Exception as exc:  # noqa: BLE001 -- any of the broker's client
                logger.debug("Event %s was not sent: %s", event.type, reason_of(exc))

    def _send(self, event: Event) -> None:
        if self._followed is not None:
            self._followed.send(event.type, **event.fields)
            return
        with self._app.events.default_dispatcher(hostname=event.worker) as dispatcher:
            dispatcher.send(event.type, **event.fields)


def tell_revoked(app: Celery, ended: Mapping[str, str]) -> None:
    """
    Send ``task-revoked`` from a process that is no worker: a command, or a web server.

    Sent whether or not a worker sends events, as this process cannot know.  Blocks for the broker,
    for some seconds at most.  Events that cannot be sent are logged at level DEBUG.

    Args:
        app: The app of the tasks.
        ended: Why each task ends, by its id.
    """
    if not ended:
        return
    try:
        with app.connection_for_write() as connection:
            connection.ensure_connection(max_retries=1, interval_start=0, timeout=BROKER_WITHIN)
            with app.events.Dispatcher(
                connection, hostname=f"dislock@{gethostname()}", buffer_while_offline=False
            ) as dispatcher:
                for task_id, reason in ended.items():
                    dispatcher.send("task-revoked", uuid=task_id, **revoked(reason))
    except Exception as exc:  # noqa: BLE001 -- any of the broker's client
        logger.debug("Event task-revoked was not sent: %s", reason_of(exc))


def events_of(app: Celery) -> Events:
    """Return the events of an app; each app has its own."""
    try:
        events: Events = app.__dict__["_dislock_events"]
    except KeyError:
        events = app.__dict__.setdefault("_dislock_events", Events(app))
    return events


def sends(dispatcher: EventDispatcher | None) -> bool:
    """Tell whether a worker's dispatcher sends events about tasks."""
    if dispatcher is None or not dispatcher.enabled:
        return False
    return not dispatcher.groups or GROUP in dispatcher.groups


def revoked(reason: str) -> dict[str, Any]:
    """
    Return the fields of ``task-revoked`` for a task that ends without having run.

    Celery's State, and so Flower, ranks states that it does not know, such as PARKED, above
    REVOKED, and keeps them; the field ``state`` is taken as it is.
    """
    return {
        "terminated": False,
        "signum": None,
        "expired": False,
        "reason": reason,
        "state": states.REVOKED,
    }
