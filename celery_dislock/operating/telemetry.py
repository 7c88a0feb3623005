"""What is counted, traced and sent as an event: the watcher of a process's locks.

This package never imports OpenTelemetry.  If the application has, the span that is current when a
task's guard is entered, such as the one of Celery's instrumentor, gets attributes and events.

If nobody asked for metrics and no span has recorded here yet, the channel tells of losses, caps and
outages only.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

from celery import Task

from celery_dislock.clock import FOREVER
from celery_dislock.locks.channel import Watcher
from celery_dislock.locks.interruption import is_pool_process
from celery_dislock.locks.lease import GONE, End
from celery_dislock.messages.events import send_events
from celery_dislock.operating.counting import SPOKEN, Counters
from celery_dislock.scripts import COUNT
from celery_dislock.servers.records import in_words

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from celery_dislock.locks.lease import Attempt, Lease
    from celery_dislock.locks.runtime import Process
    from celery_dislock.servers.records import Conflict

WITHIN = 0.5  # seconds to wait for a reply of the lock server, in the watchdog's loop
LAST_WITHIN = 1.0  # the same at the end of the process, on a new connection
BATCH_WITHIN = 2.0  # seconds to wait then for a batch that is on its way
EVENTS_MOST = 100  # that wait for the loop; then the oldest is dropped

logger = logging.getLogger("celery_dislock")


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


class Telemetry(Watcher):
    """
    Counts what happens to the locks of one process, and tells it to spans and monitors.

    Args:
        process: The process; its channel tells this of its locks.

    Attributes:
        counters: What was counted; None: nobody asked for metrics.
    """

    def __init__(self, process: Process) -> None:
        self.process = process
        self.counters: Counters | None = None
        self._events: deque[Callable[[], None]] = deque(maxlen=EVENTS_MOST)
        if process.settings.dislock_metrics:
            self.counters = Counters(process.settings.dislock_prefix, self._wake)
            self.process.channel.watched = True

    def _wake(self) -> None:
        self.process.channel.wake()  # the watchdog sets it later

    def _send_last(self, calls: Sequence[Any]) -> list[Any]:
        with closing(self.process.new_store(LAST_WITHIN)) as store:
            replies: list[Any] = store.lock_server.run_many(COUNT, calls, within=LAST_WITHIN)
        return replies

    def _count(
        self, what: str, holder: Mapping[str, Any], outcome: str = "", value: float = 1
    ) -> None:
        if self.counters is not None:
            self.counters.add(what, holder, outcome, value)

    def begins(self, attempt: Attempt) -> None:
        """Keep the current span."""
        attempt.trace = current_span()
        if attempt.trace is not None:
            self.process.channel.watched = True

    def acquired(self, lease: Lease, how: str, waited: float) -> None:
        """Count a lease."""
        self._count("acquisitions", lease.holder, how)
        self._count("wait", lease.holder, value=waited)
        about: Any = {"key": lease.key, "wait": waited, "token": lease.token}
        _note(lease.trace, outcome=how, owner=lease.owner, **about)
        _event(lease.trace, "acquired", **about)

    def resolved(self, attempt: Attempt, conflict: Conflict, outcome: str) -> None:
        """Count a conflict."""
        self._count("conflicts", attempt.holder, outcome)
        if conflict.early:
            self._count("early", attempt.holder)
        about = {"key": conflict.key, "outcome": outcome}
        _note(attempt.trace, **about)
        _event(attempt.trace, "conflict", **about, holder=in_words(conflict.holder))

    def unavailable(self, attempt: Attempt, key: str, outcome: str, reason: str) -> None:
        """Count an attempt that the lock server did not answer."""
        self._count("unavailable", attempt.holder, outcome)
        _note(attempt.trace, key=key, outcome="unavailable")
        _event(attempt.trace, "unavailable", key=key, reason=reason)

    def renewed(self, lease: Lease) -> None:
        """Count a renewal."""
        self._count("renewals", lease.holder)

    def capped(self, lease: Lease) -> None:
        """Count a cap that is reached, and send an event."""
        self._count("capped", lease.holder)
        _event(lease.trace, "capped", key=lease.key, renewals=lease.renewals)
        action = lease.lock.options.lock_on_cap
        about = {"renewals": lease.renewals, "ends_in": lease.remaining, "action": action}
        self._send_event(lease, "task-lock-capped", about)

    def lost(self, lease: Lease) -> None:
        """Count a loss, and send an event; :meth:`ended` follows."""
        reason, action = lease.why_ended, lease.lock.options.lock_on_lost
        self._count("lost", lease.holder, "gone" if reason in GONE else "expired")
        self._send_event(lease, "task-lock-lost", {"reason": reason, "action": action})

    def ended(self, lease: Lease) -> None:
        """Count for how long a lease was held."""
        held, end = lease.held_for, lease.end
        self._count("held", lease.holder, value=held)
        if end is End.LOST:
            _event(lease.trace, "lost", key=lease.key, held=held, reason=lease.why_ended)
        elif end is End.ABANDONED:
            _event(lease.trace, "abandoned", key=lease.key, held=held)
        else:
            expiring = end is End.EXPIRING
            _event(lease.trace, "released", key=lease.key, held=held, expiring=expiring)

    def message(self, task: str, outcome: str, worker: str) -> None:
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
            self._events.append(
                partial(send_events, task.app, lease.holder["worker"], type_, fields)
            )
            self._wake()
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
            server, before = self.process.loop_store.lock_server, self.counters.error
            self.counters.flush(lambda calls: server.run_many(COUNT, calls, within=WITHIN))
            error = self.counters.error
            if error is not None and before is None:
                #: WARNING: Metrics stand still; locks may work all the same; once per process and
                #: outage. -> Read the reason: the lock server is away, full, or refuses the
                #: command.
                text = "Counts for metrics cannot be sent, and are kept until they can: %s"
                logger.warning(text, error)

    def finish(self) -> None:
        """Send what is left to count."""
        if self.counters is not None:
            self.counters.flush(self._send_last, patience=BATCH_WITHIN)
