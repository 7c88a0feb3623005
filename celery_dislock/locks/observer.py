"""What happens to the locks of one process, told to one observer.

Locks and tasks call the observer at each of these moments, and know nothing of metrics, traces or
events.  It is always there.  The one in this module ignores everything; the plugin puts
:class:`celery_dislock.operating.telemetry.Telemetry` in its place.

Its methods return at once, raise nothing, and may be called by any thread or greenlet.  Only
:meth:`Observer.run` and :meth:`Observer.finish` may block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery_dislock.clock import FOREVER

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery_dislock.locks.attempt import Attempt
    from celery_dislock.locks.lease import Lease


class Observer:
    """
    Ignores what happens to the locks of one process.

    Args:
        process: The :class:`celery_dislock.locks.runtime.Process`.

    Attributes:
        wake: Called when :meth:`due_at` has become earlier; set by the watchdog.
    """

    def __init__(self, process: Any = None) -> None:
        self.process = process
        self.wake: Callable[[], None] = nothing

    def begin(self) -> Any:
        """Return what the attempt of this thread and its lease keep for the observer."""
        return None

    def acquired(self, lease: Lease, how: str, waited: float) -> None:
        """
        Take note that a lock was granted.

        Args:
            lease: The lease.
            how: "at_once", "waited", "parked" or "put_off".
            waited: Seconds since it was first asked for.
        """

    def conflict(self, attempt: Attempt, key: str, outcome: str, holder: str) -> None:
        """
        Take note that a lock was refused because it is held.

        Args:
            attempt: The attempt.
            key: The key that is held.
            outcome: What becomes of the attempt: mostly the value of ``lock_on_conflict``.
            holder: Who holds it, in words.
        """

    def unavailable(self, attempt: Attempt, key: str, outcome: str, reason: str) -> None:
        """
        Take note that the lock server did not answer an attempt.

        Args:
            attempt: The attempt.
            key: The key of the lock.
            outcome: What becomes of the attempt: the value of ``dislock_on_unavailable``.
            reason: The error.
        """

    def renewed(self, lease: Lease) -> None:
        """Take note that a lease was renewed."""

    def capped(self, lease: Lease, action: str) -> None:
        """Take note that a lease has reached its cap; *action* is its ``lock_on_cap``."""

    def lost(self, lease: Lease, action: str, *, gone: bool) -> None:
        """
        Take note that a lease was lost.

        Args:
            lease: The lease.
            action: Its ``lock_on_lost``.
            gone: Whether the server no longer had it.
        """

    def ended(self, lease: Lease, end: str, held: float) -> None:
        """
        Take note that a lease has ended; called once per lease.

        Args:
            lease: The lease.
            end: "released", "expiring" (left to expire), "abandoned" or "lost".
            held: Seconds for which it was held.
        """

    def message(self, task: str, outcome: str, worker: str = "") -> None:
        """
        Take note of what became of a message of a task that is unique when it is sent.

        Args:
            task: Name of the task.
            outcome: "sent", "duplicate", "unreserved" or "replaced".
            worker: Name of the worker that got the message; empty: this process was to send it.
        """

    def due_at(self) -> float:
        """Return the monotonic time at which the watchdog's loop calls :meth:`run`."""
        return FOREVER

    def run(self) -> None:
        """Do what is due, in the watchdog's loop; blocks for some seconds at most."""

    def finish(self) -> None:
        """Do what is left to do at the end of the process; blocks for a second at most."""


def nothing() -> None:
    """Wake nobody: there is no watchdog yet."""
