"""What is known beside a lock's records: the app's tasks, its broker, and who sweeps.

Each is asked once, when a lock needs it first; most locks need none.  If it cannot be asked,
nothing is concluded from that.
"""

from __future__ import annotations

import re
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from celery_dislock.exceptions import StoreError
from celery_dislock.keys.templates import ENCODED
from celery_dislock.messages.broker import answer_within
from celery_dislock.scripts.names import sweep_lock
from celery_dislock.tasks.task import guards_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from celery import Celery

    from celery_dislock.config.options import TaskOptions
    from celery_dislock.servers.overview import Overview

WORKERS_WITHIN = 1.0  # seconds for the workers' answers
ANSWERS_WITHIN = 4.0  # seconds for the broker, which may be slower than a lock server
NO_QUEUE = "404"  # AMQP's code; some transports have no queue without messages


class UniqueTask(NamedTuple):
    """
    A task whose messages reserve their keys.

    Attributes:
        heads: What each of its keys begins with, whatever its arguments are.
        queue: The queue that it is sent to, unless its sender names another.
        options: Its options.
    """

    heads: Sequence[str]
    queue: str
    options: TaskOptions


class Site:
    """
    What is known beside the locks.  Its methods block when they are asked for the first time.

    Args:
        overview: Reads the locks.
        app: The app; None: the locks have none.
    """

    def __init__(self, overview: Overview, app: Celery | None = None) -> None:
        self.overview = overview
        self._app = app
        self._swept: dict[str, bool] = {}
        self._unique: list[UniqueTask] | None = None
        self._waiting: dict[str, int | None] = {}

    def is_swept(self, broker: str) -> bool:
        """Tell whether a worker sweeps the lines of a broker; True if that cannot be read."""
        if broker not in self._swept:
            self._swept[broker] = True
            with suppress(StoreError):
                found = self.overview.lock(sweep_lock(self.overview.prefix, broker), most=0)
                self._swept[broker] = bool(found.holders)
        return self._swept[broker]

    def tasks_of(self, key: str) -> list[UniqueTask]:
        """Return the unique tasks of the app that may have this key."""
        if self._unique is None:
            self._unique = [] if self._app is None else list(_unique_tasks(self._app))
        return [task for task in self._unique if any(map(key.startswith, task.heads))]

    def messages_in(self, queues: Iterable[str]) -> int | None:
        """Return how many messages wait in some queues; None: the broker cannot be asked."""
        wanted = set(queues)
        if self._app is not None and not wanted <= self._waiting.keys():
            self._waiting.update(dict.fromkeys(wanted))
            with suppress(Exception):  # of any broker
                ask = partial(_lengths, self._app, wanted)
                self._waiting.update(answer_within(2 * ANSWERS_WITHIN, ask))
        found = [self._waiting.get(name) for name in wanted]
        return None if None in found else sum(filter(None, found))


def _unique_tasks(app: Celery) -> Iterable[UniqueTask]:
    with suppress(Exception):  # of a module of the user's; the others are there
        app.loader.import_default_modules()
    for name, guard in guards_of(app).items():
        if guard.options.lock_unique_until is not None:
            heads = [_head(key, name) for key in guard.options.keys]
            yield UniqueTask(heads, _queue_of(app, name), guard.options)


def _head(declared: str | Callable[..., Any] | None, task: str) -> str:
    """Return what all keys begin with that are declared so."""
    if declared is None:
        return re.split(f"[{ENCODED}]", task, maxsplit=1)[0]
    return declared.partition("<")[0] if isinstance(declared, str) else ""


def _queue_of(app: Celery, task: str) -> str:
    given = getattr(app.tasks[task], "queue", None)
    with suppress(Exception):  # of a user's router
        given = app.amqp.router.route({"queue": given} if given else {}, task).get("queue")
    return str(getattr(given, "name", given) or app.conf.task_default_queue)


def patient(app: Celery, within: float) -> dict[str, Any]:
    """Return transport options that bound the wait for a Redis broker, which has no end else."""
    options: dict[str, Any] = dict(app.conf.broker_transport_options or {})
    if app.connection_for_read().transport.driver_type != "redis":
        return options
    return {"socket_timeout": within, "socket_connect_timeout": ANSWERS_WITHIN, **options}


def _lengths(app: Celery, queues: Iterable[str]) -> dict[str, int]:
    """Ask the broker how many messages wait in queues."""
    found = {}
    options = patient(app, ANSWERS_WITHIN)
    with app.connection_for_read(transport_options=options) as connection:
        connection.ensure_connection(max_retries=1, interval_start=0, timeout=ANSWERS_WITHIN)
        for name in queues:
            with connection.channel() as channel:
                try:
                    found[name] = channel.queue_declare(queue=name, passive=True).message_count
                except connection.channel_errors as exc:
                    if str(getattr(exc, "reply_code", "")) != NO_QUEUE:
                        raise
                    found[name] = 0
    return found
