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
from functools import partial
from typing import TYPE_CHECKING, Any

from celery import bootsteps
from celery.app.task import Context
from celery.exceptions import InvalidTaskError
from celery.states import FAILURE

from celery_dislock.exceptions import DislockError
from celery_dislock.hooks import wrap_methods
from celery_dislock.messages.headers import HEADER, Notes, own_turn
from celery_dislock.messages.unrun import store_unrunnable
from celery_dislock.parking.process import runtime_of
from celery_dislock.parking.store import RUNS
from celery_dislock.scripts import LEFT_BEFORE
from celery_dislock.tasks.sending import own_reservation
from celery_dislock.tasks.task import end_unguarded

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery.worker.consumer import Consumer
    from kombu.message import Message


# Types of a body's parts: arguments, keyword arguments and embedded options.
PARTS: tuple[Any, ...] = (list, tuple), dict, (dict, type(None))

# The consumer's methods that drop a message: which argument is the message, and whether Celery
# stores a result.
DROPS = {
    "on_decode_error": (0, False),
    "on_unknown_message": (1, False),
    "on_invalid_task": (1, False),
    "on_unknown_task": (1, True),
}

logger = logging.getLogger("celery_dislock")


class ArrivalStep(bootsteps.Step):  # type: ignore[misc]
    """
    Bootstep of a worker's consumer: checks each message before Celery makes a task of it.

    Args:
        consumer: The consumer in a worker's main process.
    """

    label = "Dislock arrivals"

    def __init__(self, consumer: Consumer, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)
        self._consumer = consumer
        self._app = consumer.app
        self._runtime = runtime_of(consumer.app)
        # Celery sends no signal for a message that it drops, nor before it has a request of it.
        wrapping: dict[str, Callable[..., Any]] = {
            name: partial(self.dropping, nth=nth, tells=tells)
            for name, (nth, tells) in DROPS.items()
        }
        wrap_methods(consumer, {**wrapping, "update_strategies": self.looking})

    def dropping(self, drop: Callable[..., Any], nth: int, *, tells: bool) -> Callable[..., Any]:
        """Wrap a method that drops messages, so that parked tasks leave their lines.

        Args:
            drop: The consumer's method.
            nth: Index of the message in the method's arguments.
            tells: Whether the method stores a result.
        """

        def dropped(*args: Any) -> Any:
            request = _request_of(args[nth])
            if request is None:
                return drop(*args)
            own_reservation(self._app, request).end()  # before its end can be seen
            try:
                return drop(*args)
            finally:
                error = _why(args[-1])
                if not tells and self._turn_of(request) is not None:
                    store_unrunnable(self._app, request, error)
                end_unguarded(self._app, request, FAILURE, error)

        return dropped

    def _turn_of(self, request: Context) -> tuple[str, str] | None:
        return own_turn(request, self._runtime.settings.dislock_prefix)

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
            if headers and HEADER in headers and not self._becomes_task(name, message, body):
                message.ack_log_error(logger, self._consumer.connection_errors)
                return None
            return strategy(message, body, *args)

        return look

    def _becomes_task(self, name: str, message: Message, body: Any) -> bool:
        """
        Tell whether Celery should make a task of the message; False to only acknowledge it.

        Raises:
            InvalidTaskError: The message's body is damaged.
        """
        request = _request_of(message)
        turn = None if request is None else self._turn_of(request)
        if request is None or turn is None:
            return True
        if body is None:
            _check(message.payload)
        guard = getattr(self._app.tasks[name], "dislock_guard", None)
        if guard is not None and guard.has_lock:
            return True
        what = f"Task {name}[{request.id}]"
        try:
            process, goes_on = self._runtime.process, True
            if process.can_park:
                # An earlier delivery may have claimed the turn, and its reply was lost.
                for owner in Notes.of(request).given_up:
                    process.store.release([turn[0]], owner)
                has_left = process.lines.leave(*turn, RUNS, name) != LEFT_BEFORE
                goes_on = has_left or bool((request.delivery_info or {}).get("redelivered"))
        except DislockError as exc:
            #: WARNING `Task … runs without a lock, and stays in line for lock …: it may run again:
            #: …`: Its task takes no lock in this worker any more, and the lock server is away. ->
            #: Check the lock server.
            logger.warning(
                "%s runs without a lock, and stays in line for lock %s: it may run again: %s",
                *(what, turn[0], exc),
            )
            return True
        if goes_on:
            #: INFO `Task … runs without a lock: it was parked for lock …, and takes none in this
            #: worker.`: Its task takes no lock in this worker any more. -> See whether that is
            #: intended.
            logger.info(
                "%s runs without a lock: it was parked for lock %s, and takes none in this worker.",
                *(what, turn[0]),
            )
        else:
            #: INFO `Task … acknowledged unrun: another copy of it has left the line for lock ….`: A
            #: second copy of a task that ran without a lock.
            logger.info(
                "%s acknowledged unrun: another copy of it has left the line for lock %s.",
                *(what, turn[0]),
            )
        return goes_on


def _why(error: object) -> Exception:
    """Return the error for which Celery has dropped a message."""
    unnamed: Exception = InvalidTaskError("the message has no task name")
    unknown: Exception = InvalidTaskError("this worker has no task of that name")
    if isinstance(error, KeyError):  # of Celery's task registry
        return unknown
    return error if isinstance(error, Exception) else unnamed


def _request_of(message: Message) -> Context | None:
    """Return a request with the message's headers; None if it has none."""
    headers = message.headers
    if not isinstance(headers, dict):
        return None
    # In message protocol 1 the headers have no id; the correlation id is the same.
    about = {"id": message.properties.get("correlation_id"), **headers}
    about |= {name: message.properties.get(name) for name in ("reply_to", "correlation_id")}
    about |= {"properties": message.properties, "delivery_info": message.delivery_info}
    return Context(about)


def _check(payload: Any) -> None:
    """
    Check the structure of a body, because a damaged one would stop Celery's worker.

    Raises:
        InvalidTaskError: The body is damaged.
    """
    if isinstance(payload, dict) and "args" in payload:  # message protocol 1
        return
    is_list = isinstance(payload, (list, tuple)) and len(payload) == len(PARTS)
    if not (is_list and all(map(isinstance, payload, PARTS))):
        raise InvalidTaskError("its body is damaged: it is not three parts of the right types")
