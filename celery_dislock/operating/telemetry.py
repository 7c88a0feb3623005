"""What is counted, traced and sent as an event: the observer of a process.

This package never imports OpenTelemetry.  If the application has, the span that is current when a
task's guard is entered, such as the one of Celery's instrumentor, gets attributes and events.

A defect here must not disturb a lock: it is logged, and the lock goes on.  Where nobody asked for
metrics and no span records, a lock costs a check of that for each call, and no more.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from contextlib import closing
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from celery import Task

from celery_dislock.clock import FOREVER
from celery_dislock.locks.interruption import THROWN
from celery_dislock.locks.observer import Observer
from celery_dislock.locks.running import is_pool_process
from celery_dislock.messages.events import send
from celery_dislock.operating.counting import SPOKEN, Counters
from celery_dislock.scripts import COUNT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from celery_dislock.locks.attempt import Attempt
    from celery_dislock.locks.lease import Lease
    from celery_dislock.locks.runtime import Process

WITHIN = 0.5  # seconds to wait for a reply of the lock server, in the watchdog's loop
LAST_WITHIN = 1.0  # the same at the end of the process, on a new connection
EVENTS_MOST = 100  # that wait for the loop; then the oldest is dropped

logger = logging.getLogger("celery_dislock")


def _harmless(method: Callable[..., Any]) -> Callable[..., Any]:
    """Log what a method raises, but for what a signal handler raises in the middle of it."""

    @wraps(method)
    def call(self: Telemetry, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except THROWN:
            raise
        except Exception:
            logger.exception("Unexpected error in telemetry; locks are not affected.")

    return call


def _of_a_lock(method: Callable[..., Any]) -> Callable[..., Any]:
    """Call a harmless method if anything is counted or traced."""
    careful = _harmless(method)

    @wraps(method)
    def call(self: Telemetry, about: Attempt | Lease, *args: Any, **kwargs: Any) -> None:
        if self.counters is not None or about.trace is not None:
            careful(self, about, *args, **kwargs)

    return call


def current_span() -> Any:
    """Return OpenTelemetry's current span; None if there is none that records."""
    trace: Any = sys.modules.get("opentelemetry.trace")
    get = getattr(trace, "get_current_span", None)  # missing during an import
    span = get() if get is not None else None
    return span if span is not None and span.is_recording() else None


def _note(span: Any, **attributes: str | float) -> None:
    """Set attributes ``celery_dislock.<name>``."""
    if span is not None:
        span.set_attributes({SPOKEN + name: value for name, value in attributes.items()})


def _event(span: Any, name: str, **attributes: str | float) -> None:
    """Add an event ``celery_dislock.<name>`` with attributes of that prefix."""
    if span is not None:
        about = {SPOKEN + attribute: value for attribute, value in attributes.items()}
        span.add_event(SPOKEN + name, about)


class Telemetry(Observer):
    """
    Counts what happens to the locks of one process, and tells it to spans and monitors.

    Args:
        process: The process.

    Attributes:
        counters: What was counted; None: nobody asked for metrics.
    """

    def __init__(self, process: Process) -> None:
        super().__init__(process)
        self.counters: Counters | None = None
        self._unsent = False  # and that was logged
        self._events: deque[Callable[[], None]] = deque(maxlen=EVENTS_MOST)
        if process.settings.dislock_metrics:
            self.counters = Counters(process.settings.dislock_prefix, self._send_last)
            self.counters.wake = lambda: self.wake()  # noqa: PLW0108 -- the watchdog sets it later

    def _send_last(self, calls: Sequence[Any]) -> list[Any]:
        with closing(self.process.new_store(LAST_WITHIN)) as store:
            replies: list[Any] = store.lock_server.run_many(COUNT, calls, within=LAST_WITHIN)
        return replies

    def _count(
        self, what: str, holder: Mapping[str, Any], outcome: str = "", value: float = 1
    ) -> None:
        if self.counters is not None:
            self.counters.add(what, holder, outcome, value)

    @_harmless
    def begin(self) -> Any:
        """Return the current span."""
        return current_span()

    @_of_a_lock
    def acquired(self, lease: Lease, how: str, waited: float) -> None:
        """Count a lease."""
        self._count("acquisitions", lease.holder, how)
        self._count("wait", lease.holder, value=waited)
        about: Any = {"key": lease.key, "wait": waited, "token": lease.token}
        _note(lease.trace, outcome=how, owner=lease.owner, **about)
        _event(lease.trace, "acquired", **about)

    @_of_a_lock
    def conflict(self, attempt: Attempt, key: str, outcome: str, holder: str) -> None:
        """Count a conflict."""
        self._count("conflicts", attempt.holder, outcome)
        _note(attempt.trace, key=key, outcome=outcome)
        _event(attempt.trace, "conflict", key=key, outcome=outcome, holder=holder)

    @_of_a_lock
    def unavailable(self, attempt: Attempt, key: str, outcome: str, reason: str) -> None:
        """Count an attempt that the lock server did not answer."""
        self._count("unavailable", attempt.holder, outcome)
        _note(attempt.trace, key=key, outcome="unavailable")
        _event(attempt.trace, "unavailable", key=key, reason=reason)

    @_of_a_lock
    def renewed(self, lease: Lease) -> None:
        """Count a renewal."""
        self._count("renewals", lease.holder)

    @_harmless
    def capped(self, lease: Lease, action: str) -> None:
        """Count a cap that is reached, and send an event."""
        self._count("capped", lease.holder)
        _event(lease.trace, "capped", key=lease.key, renewals=lease.renewals)
        about = {"renewals": lease.renewals, "ends_in": lease.remaining, "action": action}
        self._send_event(lease, "task-lock-capped", about)

    @_harmless
    def lost(self, lease: Lease, action: str, *, gone: bool) -> None:
        """Count a loss, and send an event; :meth:`ended` follows."""
        self._count("lost", lease.holder, "gone" if gone else "expired")
        self._send_event(lease, "task-lock-lost", {"reason": lease.why_ended, "action": action})

    @_of_a_lock
    def ended(self, lease: Lease, end: str, held: float) -> None:
        """Count for how long a lease was held."""
        self._count("held", lease.holder, value=held)
        about: dict[str, str | bool] = {}
        if end == "lost":
            about["reason"] = lease.why_ended
        elif end != "abandoned":
            end, about["expiring"] = "released", end == "expiring"
        _event(lease.trace, end, key=lease.key, held=held, **about)

    @_harmless
    def message(self, task: str, outcome: str, worker: str = "") -> None:
        """Count a message of a unique task."""
        self._count(
            "messages", {"task": task, "worker": worker or f"sender@{self.process.host}"}, outcome
        )

    def _send_event(self, lease: Lease, type_: str, about: dict[str, Any]) -> None:
        """Send an event about a task that a worker runs; in a pool process the loop does so."""
        task, task_id = lease.sender, lease.holder.get("id")
        if not isinstance(task, Task) or not task.send_events:
            return
        about["key"] = lease.key
        if is_pool_process():
            fields = {"uuid": task_id, **about}
            self._events.append(partial(send, task.app, lease.holder["worker"], type_, fields))
            self.wake()
            return
        from celery.worker import state  # noqa: PLC0415 -- other processes have none

        for request in list(state.active_requests):  # has none if the task is eager
            if request.id == task_id:  # a copy of its message may be another request
                request.send_event(type_, **about)
                return

    def due_at(self) -> float:
        """Return when counts are to be sent; at once if there are events."""
        if self._events:
            return 0.0
        return FOREVER if self.counters is None else self.counters.due_at

    def run(self) -> None:
        """Send the events, and what was counted."""
        while self._events:
            self._events.popleft()()
        if self.counters is not None:
            server = self.process.loop_store.lock_server
            self.counters.flush(lambda calls: server.run_many(COUNT, calls, within=WITHIN))
            error = self.counters.error
            if error is not None and not self._unsent:
                text = "Counts for metrics cannot be sent, and are kept until they can: %s"
                logger.warning(text, error)
            self._unsent = error is not None

    @_harmless
    def finish(self) -> None:
        """Send what is left to count."""
        if self.counters is not None:
            self.counters.finish()
