"""One delivery of a task to this process, with its lock and its state until the delivery ends.

The guard creates one object per delivery and passes it along.  Celery's request carries it as
``dislock_delivery``, and nothing else of this package.  All other attributes of a request that are
not Celery's are headers of the message, so ``request.dislock`` is the header of that name.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar
from weakref import ref

from celery._state import get_current_task
from celery.exceptions import Ignore, Reject
from celery.utils.time import maybe_iso8601

from celery_dislock.config.values import LONGEST
from celery_dislock.exceptions import StoreError
from celery_dislock.keys.templates import key_of
from celery_dislock.messages.headers import HELD, with_notes
from celery_dislock.messages.message import AS_IT_CAME, Message
from celery_dislock.messages.routes import to_one_queue
from celery_dislock.servers.requests import RELEASED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from celery import Task
    from celery.app.task import Context

    from celery_dislock.config.options import TaskOptions
    from celery_dislock.locks.lease import Attempt, Lease
    from celery_dislock.locks.lock import Lock
    from celery_dislock.messages.headers import Notes
    from celery_dislock.servers.reservations import OwnReservation, Reservation

E = TypeVar("E", bound=BaseException)
Retried: TypeAlias = "tuple[Callable[..., Any], dict[str, Any], Callable[[], Sequence[str]]]"

logger = logging.getLogger("celery_dislock")


class Traced(NamedTuple):
    """
    An execution that Celery's tracer has begun, and not ended.

    Args:
        task: The task.
        request: Its request.
        around: The execution in which this one runs eagerly; None: none.
    """

    task: Task
    request: Context
    around: Traced | None


# Celery's own stack of requests is that of the tracer's thread.  A pool that awaits runs the body
# elsewhere, and hands the context variables on.
traced: ContextVar[Traced | None] = ContextVar("dislock_traced", default=None)


def running_request(task: Task) -> Context | None:
    """Return the request of the execution of a task that runs here; None if none does."""
    stack = task.request_stack  # None: another thread binds the task at this moment
    request: Context | None = stack.top if stack is not None else None
    if request is None:
        here = traced.get()
        if here is not None and here.task == task:  # not `is`: the task may be a proxy
            return here.request
    return request


def running_as(task_id: Any) -> Context | None:
    """Return the request of the task that runs here, if it has this id."""
    running = get_current_task() or traced.get()
    return running.request if running and running.request.id == task_id else None


def outbox_of(task: Task) -> Outbox | None:
    """Return the outbox of the running body; None if no body runs, or if the task is eager."""
    delivery = Delivery.of(running_request(task))
    return delivery.outbox if delivery is not None and not delivery.is_eager else None


class Delivery:
    """
    One delivery of a task, from the guard's first instruction until the result is stored.

    The delivery owns what belongs to the message: its notes, its reservation, and the messages that
    are sent under its id.  The lease belongs to the attempt.  The guard decides how the lease ends.

    Args:
        task: The task.
        request: Celery's request.  It keeps this object alive.
        lock: The lock that the task takes for these arguments.
        attempt: The attempt to take that lock.
        notes: The notes in the message's headers.

    Attributes:
        id: The task's id.
        sent_to: The task's name in its message; an app may know a task by two names.
        is_eager: Whether the task runs eagerly: in the calling process, without a message.
        options: The task's options that apply to this delivery.
        heeded: Whether the code tells the lock's terms, so that others in line follow them; False:
            it names other keys by now.
        reservation: The reservation in the message's header, with its phase; None: it has none.
        began: Whether the body was entered.
        runs: Whether the body runs now.
        held_back: Messages that the body has sent under its own task id; None: it has sent none.
        ending: How the lease ends; RELEASED until the body has ended.
        if_done: The ending that is used if the work is done.  For a task that may have been parked,
            it ends the ticket as well, so that no copy runs.
        after_result: Functions called with the task's state, after the result is stored and the
            callbacks are sent.
    """

    def __init__(
        self, task: Task, request: Context, lock: Lock, attempt: Attempt, notes: Notes
    ) -> None:
        self.task = task
        # Weak, as the request refers to this object.  If each kept the other alive, both would be
        # left to the garbage collector, which takes more than a third of the guard's time.
        self._request = ref(request)
        self.id = request.id
        self.sent_to = str(getattr(request, "task", None) or task.name)
        self.is_eager = bool(request.is_eager)
        self.lock = lock
        self.attempt = attempt
        self.notes = notes
        self.options: TaskOptions = lock.options
        self.heeded = True
        self.reservation: OwnReservation | None = None
        self.began = self.runs = False
        self.held_back: Outbox | None = None
        self.ending = self.if_done = RELEASED
        self.after_result: list[Callable[[str], object]] = []
        # Celery copies delivery_info into a retry's options.
        self._as_it_came = (request.delivery_info or {}).pop(AS_IT_CAME, None)

    @staticmethod
    def of(request: Context | None) -> Delivery | None:
        """Return the delivery of a request; None if no guard was entered for it."""
        delivery = getattr(request, "dislock_delivery", None)
        return delivery if isinstance(delivery, Delivery) else None  # not a header of that name

    @property
    def request(self) -> Context:
        """Celery's request, which Celery keeps until the result is stored."""
        return self._request()

    @property
    def outbox(self) -> Outbox | None:
        """The messages that the body sends under its own id, held back; None if no body runs."""
        if self.runs and self.held_back is None:
            self.held_back = Outbox()
        return self.held_back if self.runs else None

    @property
    def message(self) -> Message:
        """
        The message as it came, for one queue alone.

        Raises:
            LookupError: There is none: the task is eager, or no worker of Celery's has received it.
        """
        if self._as_it_came is None:
            raise LookupError(f"task {self} came without a message that could be sent again")
        message = Message.of(self.request, self._as_it_came)
        # Mostly it came by the default exchange, which knows one queue.
        return to_one_queue(self.task.app, message) if message.exchange else message

    @property
    def came_before(self) -> bool:
        """Whether the message has its turn, was put off, or is delivered again by the broker."""
        info = self.request.delivery_info or {}
        return bool(self.notes.parked or self.notes.put_off or info.get("redelivered"))

    def tell(self, what: str, reservation: Reservation) -> None:
        """Call this method of Reservations; logs a StoreError."""
        try:
            getattr(self.lock.store.reservations, what)(reservation)
        except StoreError as exc:
            #: WARNING: The lock server went away at the end of a unique task.
            logger.warning(
                "Task %s has ended, and its key %r stays reserved until that expires: %s",
                *(self, key_of(reservation.lock), exc),
            )

    def logged(self, error: E, what: str, *, level: int = logging.INFO) -> E:
        """
        Log how the delivery ends, in place of Celery's own line about *error*.

        Args:
            error: The exception that ends the delivery; the caller raises it.
            what: What happens to the task, and why.
            level: Level of the log line.

        Returns:
            The error.
        """
        if logger.isEnabledFor(level):
            error.dislock_logged = True  # type: ignore[attr-defined]
            logger.log(level, "Task %s[%s] %s", self.task.name, self.id, what)
        return error

    def settle(self) -> None:
        """End the lease, if there is one; a second call does nothing."""
        if self.attempt.lease is not None:
            self.attempt.lease.release(self.ending)

    def __str__(self) -> str:
        return f"{self.task.name}[{self.id}]"


class Outbox:
    """
    The retries and replacements that a body sends.

    A retry or replacement that is published at once can start before the body has ended.  It would
    then find the lock held by the task that it continues.

    Attributes:
        held: Owner whose lease the retries take over, and its locks; None if the lease is released.
        retries: What sends each retry, its options, and what returns the names of its locks.
        replacements: What sends each message that replaces the task.
    """

    def __init__(self) -> None:
        self.held: list[str] | None = None
        self.retries: list[Retried] = []
        self.replacements: list[Callable[[], Any]] = []

    def hold(self, lease: Lease, lock: Lock) -> float:
        """
        Let the retries take over a lease, if all of them take the same locks, and it is not lost.

        Returns:
            For how many seconds the lease is kept, counted from its grant; 0: it is released.
        """
        locks = {*lock.names}
        are_same = all({*names()} == locks for _, _, names in self.retries)
        if not (self.retries and are_same and lease.held):
            return 0.0
        self.held = [lock.store.lock_server.known_as(lease.owner), *lock.names]
        # Of what comes later, no script could write the milliseconds.
        retry_in = max(delay_of(options) for _, options, _ in self.retries)
        return lease.held_for + min(retry_in, LONGEST) + lock.timeout

    def send(self, delivery: Delivery) -> None:
        """
        Publish all messages.

        The first of them that has a reservation takes over that of the delivery.  A retry has one
        in any case: its headers are those of the delivery.

        Args:
            delivery: The delivery whose body has sent them.

        Raises:
            Reject: Not all messages could be published; ``Task.retry()`` raises the same.
        """
        try:
            for apply_async, options, _ in self.retries:
                if self.held is not None:
                    headers = with_notes(options.get("headers"), {HELD: self.held})
                    options = {**options, "headers": headers}  # noqa: PLW2901 -- a changed copy
                apply_async(**options)
                if delivery.reservation is not None:
                    delivery.reservation.keep()
            for replace in self.replacements:
                replace()
        except Ignore:  # raised by Celery's on_replace()
            pass
        except Exception as exc:
            raise Reject(exc, requeue=False) from exc


def delay_of(options: Mapping[str, Any]) -> float:
    """Return the seconds from now until a message's ETA or countdown; 0 if it has none."""
    return seconds_until(options.get("eta") or options.get("countdown"))


def seconds_until(when: Any) -> float:
    """
    Return the seconds until a time, which is given as Celery takes it.

    0 if the time is over, or cannot be read: Celery, or the worker, then refuses the message.
    """
    try:
        if hasattr(when, "isoformat"):  # Celery takes any object with this method as an ETA
            when = when.isoformat()
        if isinstance(when, str):
            when = maybe_iso8601(when)
        if isinstance(when, datetime):
            now = datetime.now(when.tzinfo or timezone.utc)
            return max(0.0, (when.replace(tzinfo=now.tzinfo) - now).total_seconds())
        return max(0.0, float(when or 0.0))
    except (TypeError, ValueError):
        return 0.0
