"""Handle messages of parked tasks in a worker where no guard will claim their turns.

Such a turn would run out and be given again, without end.  Therefore the worker's main process
checks each message that brings a turn:

- The task is unknown in this worker, or the message's body is damaged.  Celery drops the message.
  The task leaves the line with the result FAILURE, and is set aside.
- The task takes no lock in this worker.  It leaves the line and runs.  Other copies of the message
  do not run.

For other messages, only the headers are checked.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from celery import bootsteps
from celery.app.task import Context
from celery.exceptions import InvalidTaskError

from celery_dislock.exceptions import DislockError
from celery_dislock.hooks import watch_consumer
from celery_dislock.messages.headers import TICKET_HEADER, own_turn
from celery_dislock.messages.message import result_is_ignored
from celery_dislock.parking.park import delivery_of
from celery_dislock.parking.process import runtime_of
from celery_dislock.parking.store import withdraw
from celery_dislock.redaction import reason_of
from celery_dislock.tasks.sending import tell

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery.worker.consumer import Consumer
    from kombu.message import Message

PARTS = 3  # of a body: arguments, keyword arguments and embedded options

logger = logging.getLogger("celery_dislock")


class ArrivalStep(bootsteps.Step):  # type: ignore[misc]
    """Bootstep of a worker's consumer: checks each message before Celery makes a task of it."""

    label = "Dislock arrivals"

    def __init__(self, consumer: Consumer, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)
        arrivals = Arrivals(consumer)
        watch_consumer(consumer, arrivals.dropping, arrivals.looking)


class Arrivals:
    """
    Checks a consumer's messages for turns of parked tasks.

    Args:
        consumer: The consumer in a worker's main process.
    """

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._app = consumer.app
        self._runtime = runtime_of(consumer.app)

    def dropping(self, drop: Callable[..., Any], nth: int, *, tells: bool) -> Callable[..., Any]:
        """Wrap a method that drops messages, so that parked tasks leave their lines.

        Args:
            drop: The consumer's method.
            nth: Index of the message in the method's arguments.
            tells: Whether the method stores a result.
        """

        def dropped(*args: Any) -> Any:
            try:
                return drop(*args)
            finally:
                message = args[nth]
                if isinstance(message.headers, dict):
                    tell(self._app, "end", _context_of(message))
                request = _request_of(message)
                if request is not None:
                    error = args[-1] if isinstance(args[-1], Exception) else None
                    error = error or InvalidTaskError("the message has no task name")
                    self._dropped(request, error, tells=tells)

        return dropped

    def _dropped(self, request: Context, error: Exception, *, tells: bool) -> None:
        turn = self._turn_of(request)
        if turn is None:
            return
        if not tells:
            self._store_failure(request, error)
        if isinstance(error, KeyError):  # of Celery's task registry
            error = InvalidTaskError("this worker has no task of that name")
        try:
            if not self._runtime.process.can_park:
                return
            lines = self._runtime.process.lines
        except DislockError as exc:
            logger.warning("Parked task %s cannot be run, and stays in line: %s", turn[1], exc)
            return
        withdraw(lines, turn, f"{request.task}[{turn[1]}]", error, request.task or "")

    def _turn_of(self, request: Context) -> tuple[str, str] | None:
        return own_turn(request, self._runtime.settings.dislock_prefix)

    def _store_failure(self, request: Context, error: Exception) -> None:
        task = self._app.tasks.get(request.task)
        backend = task.backend if task is not None else self._app.backend
        wanted = task is None or not result_is_ignored(task, request)
        try:
            backend.mark_as_failure(request.id, error, request=request, store_result=wanted)
        except Exception as exc:  # noqa: BLE001 -- any of the backend's client
            logger.warning(
                "Task %s[%s] cannot be run, and its result does not say so: %s",
                *(request.task, request.id, reason_of(exc)),
            )

    def looking(self, update_strategies: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap ``update_strategies``, so that each message is checked before Celery handles it."""

        def update() -> None:
            update_strategies()
            strategies = self._consumer.strategies
            for name, strategy in strategies.items():
                strategies[name] = self._looking(name, strategy)

        return update

    def _looking(self, name: str, strategy: Callable[..., Any]) -> Callable[..., Any]:
        def look(message: Message, body: Any, *args: Any) -> Any:
            headers = message.headers
            if headers and TICKET_HEADER in headers and not self._goes_on(name, message, body):
                message.ack_log_error(logger, self._consumer.connection_errors)
                return None
            return strategy(message, body, *args)

        return look

    def _goes_on(self, name: str, message: Message, body: Any) -> bool:
        """
        Tell whether Celery should make a task of the message; False to only acknowledge it.

        Raises:
            InvalidTaskError: The message's body is damaged.
        """
        request = _request_of(message)
        turn = self._turn_of(request) if request is not None else None
        if request is None or turn is None:
            return True
        if body is None:
            _check(message.payload)
        guard = getattr(self._app.tasks[name], "dislock_guard", None)
        if guard is not None and not self._runtime.off:
            return True
        lock, ticket = turn
        try:
            process = self._runtime.process
            if not process.can_park or process.lines.withdraw(
                lock, ticket, delivery_of(request.headers, message.properties), name
            ):
                logger.info(
                    "Task %s[%s] runs without a lock: it was parked for lock %s, and takes none in "
                    "this worker.",
                    *(name, request.id, lock),
                )
                return True
        except DislockError as exc:
            logger.warning(
                "Task %s[%s] runs without a lock, and stays in line for lock %s: it may run again: "
                "%s",
                *(name, request.id, lock, exc),
            )
            return True
        if message.delivery_info.get("redelivered"):  # may be the delivery that was allowed to run
            return True
        logger.info(
            "Task %s[%s] acknowledged unrun: another copy of it has left the line for lock %s.",
            *(name, request.id, lock),
        )
        return False


def _request_of(message: Message) -> Context | None:
    """Return a request with the message's headers; None if they bring no turn."""
    headers = message.headers
    if not isinstance(headers, dict) or TICKET_HEADER not in headers:
        return None
    return _context_of(message)


def _context_of(message: Message) -> Context:
    # In message protocol 1 the headers have no id; the correlation id is the same.
    headers = message.headers
    about = {"id": message.properties.get("correlation_id"), **headers, "headers": headers}
    return Context(about)


def _check(payload: Any) -> None:
    """
    Check the structure of a body, because a damaged one would stop Celery's worker.

    Raises:
        InvalidTaskError: The body is damaged.
    """
    if isinstance(payload, dict) and "args" in payload:
        return
    if not (isinstance(payload, (list, tuple)) and len(payload) == PARTS):
        raise InvalidTaskError("its body is damaged: it does not have three parts")
    args, kwargs, embedded = payload
    if not (
        isinstance(args, (list, tuple))
        and isinstance(kwargs, dict)
        and isinstance(embedded, (dict, type(None)))
    ):
        raise InvalidTaskError("its body is damaged: its arguments have the wrong type")
