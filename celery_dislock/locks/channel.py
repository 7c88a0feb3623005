"""The channel on which the locks of one process tell what happens to them.

Locks, tasks and the watchdog tell the channel, and do not know what it passes this on to: the log,
the running body, the watchers of the process, and the receivers of the signals, in this order.  The
plugin makes :class:`celery_dislock.operating.telemetry.Telemetry` a watcher.

Every task takes and releases its lock, and mostly nobody watches.  So these two steps first ask
whether anybody does, and otherwise make no call::

    if channel.watched or lock_acquired.receivers:
        channel.acquired(lease, how, waited)
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from celery_dislock import signals
from celery_dislock.clock import FOREVER
from celery_dislock.locks.interruption import THROWN
from celery_dislock.locks.lease import End
from celery_dislock.servers.records import in_words
from celery_dislock.words import plain

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery_dislock.locks.lease import Attempt, Lease
    from celery_dislock.servers.records import Conflict

TRACING = "opentelemetry.trace"  # a module that is imported in each process with spans

logger = logging.getLogger("celery_dislock")


class Watcher:
    """
    Takes note of what happens to the locks of one process; this one ignores everything.

    The methods may be called in any thread or greenlet.  Only :meth:`run` and :meth:`finish` may
    block.  The other methods have the arguments of those of :class:`Channel`.
    """

    def begins(self, attempt: Attempt) -> None:
        """Keep what is needed later in ``attempt.trace``; called if TRACING is imported."""

    def acquired(self, lease: Lease, how: str, waited: float) -> None:
        """Take note that a lock was granted."""

    def resolved(self, attempt: Attempt, conflict: Conflict, outcome: str) -> None:
        """Take note of what becomes of an attempt that was refused."""

    def unavailable(self, attempt: Attempt, key: str, outcome: str, reason: str) -> None:
        """Take note that the lock server did not answer an attempt."""

    def renewed(self, lease: Lease) -> None:
        """Take note that a lease was renewed."""

    def capped(self, lease: Lease) -> None:
        """Take note that a lease has reached its cap."""

    def lost(self, lease: Lease) -> None:
        """Take note that a lease was lost; :meth:`ended` follows."""

    def ended(self, lease: Lease) -> None:
        """Take note that a lease has ended, and how; called once per lease."""

    def message(self, task: str, outcome: str, worker: str) -> None:
        """Take note of what became of a message."""

    def due_at(self) -> float:
        """Return the monotonic time at which the watchdog's loop calls :meth:`run`."""
        return FOREVER

    def run(self) -> None:
        """Do what is due, in the watchdog's loop; blocks for some seconds at most."""

    def finish(self) -> None:
        """Do the last work at the end of the process; blocks for a second at most."""


class Channel:
    """
    Tells what happens to the locks of one process.

    What a watcher raises is logged, and disturbs no lock.  Celery's dispatcher does the same for
    the receivers of signals.

    Attributes:
        watchers: The watchers.
        watched: Whether a watcher wants to hear of each lease.  False: of losses, caps and outages
            only.
        wake: Called when :meth:`due_at` has become earlier; set by the watchdog.
    """

    def __init__(self) -> None:
        self.watchers: list[Watcher] = []
        self.watched = False
        self.wake: Callable[[], None] = nothing

    def begins(self, attempt: Attempt) -> None:
        """Tell that a task begins an attempt, before anything was asked for."""
        self._tell(lambda watcher: watcher.begins(attempt))

    def acquired(self, lease: Lease, how: str, waited: float) -> None:
        """
        Tell that a lock was granted.

        Args:
            lease: The lease.
            how: "at_once", "waited", "parked" or "put_off".
            waited: Seconds since it was first asked for.
        """
        self._tell(lambda watcher: watcher.acquired(lease, how, waited))
        signals.lock_acquired.send(sender=lease.sender, lease=lease)

    def resolved(self, attempt: Attempt, conflict: Conflict, outcome: str) -> None:
        """
        Tell what becomes of an attempt that was refused.

        Args:
            attempt: The attempt.
            conflict: The conflict.
            outcome: Mostly the value of ``lock_on_conflict``.
        """
        self._tell(lambda watcher: watcher.resolved(attempt, conflict, outcome))

    def unavailable(self, attempt: Attempt, key: str, outcome: str, reason: str) -> None:
        """
        Tell that the lock server did not answer an attempt.

        Args:
            attempt: The attempt.
            key: The key of the lock.
            outcome: What becomes of the attempt: the value of ``dislock_on_unavailable``.
            reason: The error.
        """
        self._tell(lambda watcher: watcher.unavailable(attempt, key, outcome, reason))

    def renewed(self, lease: Lease) -> None:
        """Tell that a lease was renewed."""
        self._tell(lambda watcher: watcher.renewed(lease))
        signals.lock_renewed.send(sender=lease.sender, lease=lease)

    def lost(self, lease: Lease) -> None:
        """Tell that a lease is lost, after ``lock_on_lost`` was applied to the body."""
        action, reason = lease.lock.options.lock_on_lost, lease.why_ended
        #: ERROR: The body runs without its lock, and another task may start. -> Look up [the
        #: reason](#why-a-lock-is-lost). With `lock_on_lost="warn"`, see whether two runs did harm.
        logger.error(
            "Lock %r of %s is lost: %s. Another execution may hold it by now; lock_on_lost=%r.",
            *(lease.key, in_words(lease.holder), reason, action),
        )
        try:
            lease.on_end(lease, action)
        finally:
            self._tell(lambda watcher: watcher.lost(lease))
            self._ended(lease)
            signals.lock_lost.send(sender=lease.sender, lease=lease, reason=reason)

    def capped(self, lease: Lease) -> None:
        """Tell that a lease has reached its cap, after ``lock_on_cap`` was applied to the body."""
        action = lease.lock.options.lock_on_cap
        #: WARNING: The task hangs, or takes longer than its cap. -> Correct the task, or raise
        #: `max_renew_times`.
        logger.warning(
            "Lock %r of %s was renewed %d times, its cap, and ends in %.1f s; lock_on_cap=%r.",
            *(lease.key, in_words(lease.holder), lease.renewals, lease.remaining, action),
        )
        try:
            lease.on_end(lease, action)
        finally:
            self._tell(lambda watcher: watcher.capped(lease))
            signals.lock_capped.send(sender=lease.sender, lease=lease)

    def superseded(self, action: str, lease: Lease) -> None:
        """Tell that a newer task waits for a lease, after this action was applied to the body."""
        #: INFO: The newest task of the key cancels this one; its body is stopped as the line says.
        logger.info(
            "Task %s, which was sent later, waits for lock %r of %s; lock_on_cancel=%r.",
            *(plain(lease.superseded), lease.key, in_words(lease.holder), action),
        )
        try:
            lease.on_end(lease, action)
        finally:
            self.renewed(lease)
            if not lease.terminated:
                signals.lock_superseded.send(sender=lease.sender, lease=lease)

    def abandoned(self, lease: Lease) -> None:
        """Tell that the owner of a lease has ended without releasing it."""
        self._ended(lease)
        #: WARNING: A thread, greenlet or asyncio task ended without releasing its lock, and nobody
        #: else can. -> Use a `with` block there.
        logger.warning(
            "Lock %r of %s is renewed no more and ends in %.1f s: its owner has ended "
            "without releasing it.",
            *(lease.key, in_words(lease.holder), lease.trust_left),
        )

    def released(self, lease: Lease, *, expiring: bool) -> None:
        """Tell that the owner has released a lease, or leaves it to expire."""
        self._ended(lease)
        if lease.end is not End.LOST:
            signals.lock_released.send(sender=lease.sender, lease=lease, expiring=expiring)

    def message(self, task: str, outcome: str, worker: str = "") -> None:
        """
        Tell what became of a message of a task that is unique when it is sent.

        Args:
            task: Name of the task.
            outcome: "sent", "duplicate", "unreserved" or "replaced".
            worker: Name of the worker that got the message; empty: this process sends it.
        """
        self._tell(lambda watcher: watcher.message(task, outcome, worker))

    def due_at(self) -> float:
        """Return the monotonic time at which the watchdog's loop calls :meth:`run`."""
        return min([watcher.due_at() for watcher in self.watchers], default=FOREVER)

    def run(self) -> None:
        """Let the watchers do what is due, in the watchdog's loop; may block for some seconds."""
        for watcher in self.watchers:
            watcher.run()

    def finish(self) -> None:
        """Let the watchers do their last work at the end of the process; may block for a second."""
        self._tell(lambda watcher: watcher.finish())

    def _ended(self, lease: Lease) -> None:
        if not lease.reported and lease.end is not None:
            lease.reported = True
            self._tell(lambda watcher: watcher.ended(lease))

    def _tell(self, tell: Callable[[Watcher], None]) -> None:
        for watcher in self.watchers:
            try:
                tell(watcher)
            except THROWN:  # by a signal handler, into the body that runs here
                raise
            except Exception:
                #: ERROR: A bug in this package; a count or an event is missing. -> Report the
                #: traceback.
                logger.exception("Unexpected error in telemetry; locks are not affected.")


def nothing() -> None:
    """Wake nobody: there is no watchdog yet."""
