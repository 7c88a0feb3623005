"""What is counted and traced: the observer of a process that tells metrics and OpenTelemetry.

A defect here must not disturb a lock: it is logged, and the lock goes on.
"""

from __future__ import annotations

import logging
from functools import wraps
from typing import TYPE_CHECKING, Any

from billiard.exceptions import SoftTimeLimitExceeded

from celery_dislock.locks.observer import FOREVER, Observer
from celery_dislock.operating.counting import (
    ACQUIRED,
    CAPPED,
    CONFLICT,
    HELD,
    LOST,
    MESSAGE,
    RENEWED,
    UNAVAILABLE,
    WAIT,
    Counters,
)
from celery_dislock.operating.tracing import current_span
from celery_dislock.scripts import COUNT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from celery_dislock.exceptions import StoreError
    from celery_dislock.locks.observer import Asking, Holding
    from celery_dislock.locks.runtime import Process

WITHIN = 0.5  # seconds to wait for a reply in the watchdog's loop

logger = logging.getLogger("celery_dislock")


def _harmless(method: Callable[..., Any]) -> Callable[..., Any]:
    """Log what a method raises, but for what a signal handler raises in the middle of it."""

    @wraps(method)
    def call(self: Telemetry, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except SoftTimeLimitExceeded:
            raise
        except Exception:
            logger.exception("Unexpected error in telemetry; locks are not affected.")

    return call


class Telemetry(Observer):
    """
    Counts what happens to the locks of one process, and tells the spans of its tasks.

    Args:
        process: The process.
    """

    def __init__(self, process: Process) -> None:
        super().__init__(process)
        self._counters: Counters | None = None
        self._unsent = False  # and that was logged
        if process.settings.dislock_metrics:
            name = process.owner_name(f"{process.host}:{process.pid}/")
            self._counters = Counters(
                process.settings.dislock_prefix, name, lambda: process.quick_store.lock_server
            )
            self._counters.wake = self._wake

    def _wake(self) -> None:
        self.wake()

    def _count(
        self, what: str, holder: Mapping[str, Any], outcome: str = "", value: float = 1
    ) -> None:
        if self._counters is not None:
            self._counters.add(what, holder, outcome, value)

    @_harmless
    def begin(self) -> Any:
        """Return the current span."""
        return current_span()

    @_harmless
    def acquired(self, lease: Holding, how: str, waited: float) -> None:
        """Count a lease."""
        self._count(ACQUIRED, lease.holder, how)
        self._count(WAIT, lease.holder, value=waited)
        if lease.trace is not None:
            lease.trace.note(
                key=lease.key, outcome=how, wait=waited, token=lease.token, owner=lease.owner
            )
            lease.trace.event("acquired", key=lease.key, wait=waited, token=lease.token)

    @_harmless
    def conflict(self, attempt: Asking, key: str, outcome: str, holder: str) -> None:
        """Count a conflict."""
        self._count(CONFLICT, attempt.holder, outcome)
        if attempt.trace is not None:
            attempt.trace.note(key=key, outcome=outcome)
            attempt.trace.event("conflict", key=key, outcome=outcome, holder=holder)

    @_harmless
    def unavailable(self, attempt: Asking, key: str, outcome: str, reason: str) -> None:
        """Count an attempt that the lock server did not answer."""
        self._count(UNAVAILABLE, attempt.holder, outcome)
        if attempt.trace is not None:
            attempt.trace.note(key=key, outcome="unavailable")
            attempt.trace.event("unavailable", key=key, reason=reason)

    @_harmless
    def renewed(self, lease: Holding) -> None:
        """Count a renewal."""
        self._count(RENEWED, lease.holder)

    @_harmless
    def capped(self, lease: Holding, action: str) -> None:  # noqa: ARG002 -- for events
        """Count a cap that is reached."""
        self._count(CAPPED, lease.holder)
        if lease.trace is not None:
            lease.trace.event("capped", key=lease.key, renewals=lease.renewals)

    @_harmless
    def lost(self, lease: Holding, action: str, *, gone: bool) -> None:  # noqa: ARG002 -- for events
        """Count a loss."""
        self._count(LOST, lease.holder, "gone" if gone else "expired")

    @_harmless
    def ended(self, lease: Holding, end: str, held: float) -> None:
        """Count for how long a lease was held."""
        self._count(HELD, lease.holder, value=held)
        if lease.trace is not None:
            about: dict[str, str | bool] = {}
            if end == "lost":
                about["reason"] = lease.why_ended
            elif end != "abandoned":
                end, about["expiring"] = "released", end == "expiring"
            lease.trace.event(end, key=lease.key, held=held, **about)

    @_harmless
    def message(self, task: str, outcome: str, worker: str = "") -> None:
        """Count a message of a unique task."""
        holder = {"task": task, "worker": worker or f"sender@{self.process.host}"}
        self._count(MESSAGE, holder, outcome)

    def due_at(self) -> float:
        """Return when counts are to be sent."""
        return FOREVER if self._counters is None else self._counters.due_at

    def run(self) -> None:
        """Send what was counted."""
        if self._counters is not None:
            server = self.process.loop_store.lock_server
            self._counters.flush(lambda calls: server.run_many(COUNT, calls, within=WITHIN))
            self._report_unsent(self._counters.error)

    def _report_unsent(self, error: StoreError | None) -> None:
        if error is not None and not self._unsent:
            logger.warning(
                "Counts for metrics cannot be sent, and are kept until they can: %s", error
            )
        self._unsent = error is not None

    @_harmless
    def finish(self) -> None:
        """Send what is left."""
        if self._counters is not None:
            self._counters.finish()
