"""Renew the locks of pool processes that are alive and do not renew them themselves.

A body that holds the GIL, in a long call of a C library, stops the watchdog of its process, and so
does SIGSTOP.  The main process of a prefork worker knows which executions run, where, and with
which arguments, and thus their keys and their owners but for the counter.  When a lease may be
overdue, the main process asks the server to renew it if nobody has, and to say when it is overdue
next: a healthy process costs the server a look at its lock per renewal.  The server counts the cap
from the acquisition.

Such a body may have to end: a newer task waits for that, or its lease has had all its renewals.
Nothing in its process can stop it, so the main process kills the process, if the options ask to
terminate the body.

All of it runs in the worker's timer, which is the event loop if the worker has one.  A thread could
be running while the main process forks a pool process; see :mod:`celery_dislock.tasks.request`.
Where the timer stands still, a thread goes on; see :class:`LastingStep`.

A process that was told to end, by a revoke or a cold shutdown, is looked after until it has ended:
a body that holds the GIL hears of the signal when it gives the GIL back.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from celery_dislock.exceptions import DamagedLockError, StoreError
from celery_dislock.keys.names import execution_start
from celery_dislock.locks.lease import EARLY_BY
from celery_dislock.parking.process import runtime_of
from celery_dislock.servers.requests import Execution
from celery_dislock.servers.server import Outage
from celery_dislock.tasks.cancelling import why_replaced
from celery_dislock.tasks.request import is_alive, is_child
from celery_dislock.tasks.task import guards_of
from celery_dislock.worker.timed import LastingStep, executed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from celery.worker import WorkController

    from celery_dislock.servers.replies import StalledState
    from celery_dislock.servers.store import Store

WITHIN = 0.5  # seconds to wait for the server's reply; the worker's event loop waits, too
LOOKS = 4  # per renewal interval; the first one after an execution may be overdue looks at it
OVERDUE = 1.2  # renewal intervals without a renewal after which the main process renews
CAPPED = 0.5  # renewal intervals between two looks at an overdue lease at its cap

logger = logging.getLogger("celery_dislock")


class StalledStep(LastingStep):
    """Bootstep of a prefork worker that locks: renews for pool processes that do not."""

    label = "Dislock stalled"

    def include_if(self, worker: WorkController) -> bool:
        """Tell whether this worker has pool processes, and tasks whose locks are renewed."""
        self._runtime = runtime_of(worker.app)
        intervals = [guard.interval for guard in guards_of(worker.app).values() if guard.interval]
        self.every = min(intervals, default=0.0) / LOOKS
        return (
            bool(intervals)
            and not self._runtime.off
            and self._runtime.settings.dislock_renew_for_stalled
            and getattr(worker.pool_cls, "uses_semaphore", False)  # prefork alone does
        )

    def connect(self) -> None:
        """Begin anew: an execution is looked at a renewal interval after it is seen first."""
        self._keeper = StalledKeeper(self._runtime.new_process().store)

    def work(self) -> None:
        """Look at the executions."""
        self._keeper.look(executed())


class Watched:
    """What is known of one execution.

    Args:
        since: Monotonic time at which it was seen first.

    Attributes:
        due: Monotonic time of the next look at it.
        execution: How to renew its leases; None: not known yet.
        silent_since: Monotonic time from which its process has not renewed; None: it does.
        told: Whether the log says so.
        superseded_since: Monotonic time at which a newer task was seen to wait for its end; None:
            none waits.
    """

    def __init__(self, since: float, due: float) -> None:
        self.since, self.due = since, due
        self.execution: Execution | None = None
        self.silent_since: float | None = None
        self.told = False
        self.superseded_since: float | None = None


class StalledKeeper:
    """
    Renews the leases of overdue executions.  Use it from one thread at a time.

    Args:
        store: Sends the renewals; no other thread may send any through it.
        clock: Monotonic clock in seconds.
    """

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._watched: WeakKeyDictionary[Any, Watched] = WeakKeyDictionary()
        self._outage = Outage()

    def look(self, requests: Iterable[Any]) -> None:
        """
        Have the server renew what is overdue; one round trip, or none if nothing is due.

        Errors are logged, and the next look tries again.

        Args:
            requests: The requests that pool processes execute.
        """
        try:
            now = self._clock()
            due = [
                (request, watched)
                for request in list(requests)
                if (watched := self._due(request, now)) and is_alive(request.worker_pid)
            ]
            if due:
                self._renew(due, now)
        except StoreError as exc:
            self._failed(exc)
        except Exception:
            #: ERROR: A bug in this package. -> Report the traceback.
            logger.exception("Could not look for stalled pool processes; will be tried again.")

    def _due(self, request: Any, now: float) -> Watched | None:
        """Return what is known of an execution if it is time to look at it."""
        watched = self._watched.get(request)
        if watched is None:
            guard = getattr(request.task, "dislock_guard", None)
            if guard is None or not guard.interval or not is_child(request.worker_pid):
                return None
            # Most executions have ended before their key is needed.
            self._watched[request] = Watched(now, now + guard.interval)
            return None
        if watched.due > now:
            return None
        if watched.execution is None:
            watched.execution = _execution(request)
            if watched.execution is None:
                watched.due = math.inf
                return None
        return watched

    def _renew(self, due: list[tuple[Any, Watched]], now: float) -> None:
        executions = [watched.execution for _, watched in due if watched.execution is not None]
        answers = self._store.renew_stalled(executions, within=WITHIN)
        errors = [answer for answer in answers if isinstance(answer, StoreError)]
        away = [error for error in errors if not isinstance(error, DamagedLockError)]
        if away:  # one node of several
            self._failed(away[0])
        elif self._outage.ends():
            #: INFO: The lock server answers the main process again.
            logger.info("Pool processes that may be stalled are looked after again.")
        for (request, watched), found in zip(due, answers, strict=True):
            if isinstance(found, DamagedLockError):  # it stays so, and the child has said it
                watched.due = math.inf
            if isinstance(found, StoreError):
                continue
            # Soon again if it is capped: nobody renews the lease until the second look.
            after = request.task.dislock_guard.interval * (CAPPED if found.capped else OVERDUE)
            watched.due = now + min(found.overdue_in or after, after)
            why = _why_killed(request, watched, found, now)
            self._tell(request, watched, found, now)
            if why:
                #: ERROR: `terminate`, or `lock_cancel_after`, and the body holds the GIL, or its
                #: process was stopped. The lock is free then.
                logger.error(
                    "Killing process %d, which stands still, with the body of %s[%s]: %s",
                    *(request.worker_pid, request.name, request.id, why),
                )
                os.kill(request.worker_pid, signal.SIGKILL)

    def _tell(self, request: Any, watched: Watched, found: StalledState, now: float) -> None:
        """Log once that a process does not renew, if the main process has to do so again."""
        if not (found.unrenewed or found.capped):
            watched.silent_since = None
        elif watched.silent_since is None:  # the process may do so next, as after an outage
            watched.silent_since = now - found.unrenewed
        elif not (watched.told or found.capped):
            watched.told = True
            #: WARNING: The main process renews it instead, up to its cap; once per task. -> Look at
            #: the process: `ps -o stat= -p PID` says T if it was stopped.
            logger.warning(
                "Process %d has not renewed the lock of %s[%s] for %.1f s: it was stopped, its "
                "body holds the GIL, it cannot reach the lock server, or its body has ended and "
                "the release does not get through. The main process renews the lock, up to its "
                "cap.",
                *(request.worker_pid, request.name, request.id, now - watched.silent_since),
            )

    def _failed(self, error: StoreError) -> None:
        if self._outage.begins():  # the processes themselves warn of it
            #: INFO: The lock server is away for the main process. -> Check the lock server.
            logger.info(
                "Cannot look after pool processes that may be stalled, trying again: %s", error
            )


def _why_killed(request: Any, watched: Watched, found: StalledState, now: float) -> str:
    """Return why a body that stands still is terminated; empty: it is not, or not yet."""
    if watched.silent_since is None:  # at the last look its process did what it has to
        return ""
    options = request.task.dislock_guard.options
    if found.capped:
        return "its lease is at its cap" if options.lock_on_cap == "terminate" else ""
    after = 0.0 if options.on_cancel == "terminate" else options.lock_cancel_after
    newer = why_replaced(request) if found.unrenewed and after is not None else ""
    if not newer:
        watched.superseded_since = None
        return ""
    if watched.superseded_since is None:
        watched.superseded_since = now
    undisturbed = watched.since + options.lock_cancel_not_before
    return newer if now >= max(watched.superseded_since + after, undisturbed) else ""


def _execution(request: Any) -> Execution | None:
    guard = request.task.dislock_guard
    interval = guard.interval
    try:
        names = guard.runtime.lock_names(guard.keys_of(request))
    except Exception as exc:  # noqa: BLE001 -- any error of a user's callable
        #: WARNING: A `lock_key` callable raised in the main process. -> Let it use its arguments
        #: only.
        logger.warning(
            "The lock of %s[%s] is not renewed if its process is stalled: its key is unknown: %r",
            *(request.name, request.id, exc),
        )
        return None
    return Execution(
        names,
        execution_start(request.id, request.hostname, request.worker_pid),
        ttl=guard.timeout,
        overdue=interval * OVERDUE,
        # The watchdog's last renewal may be as early as that, and must stay the last.
        longest=max(guard.options.max_renew_times, 0) * interval * (1 - EARLY_BY),
    )
