"""Hand off free locks that have tasks in line but were not handed off.

A holder that crashed does not hand off its lock, and a process may die before it has published a
parked task.  Therefore one worker at a time sweeps the lines of its broker, under a lease of its
own.  The sweep runs in the worker's timer, one page at a time, and visits each line once within a
third of the watchdog timeout.  Each line costs one script call.  A line whose lock is held is left
as it is.
"""

from __future__ import annotations

import contextlib
import json
import logging
from typing import TYPE_CHECKING

from celery_dislock.clock import monotonic
from celery_dislock.config.options import RENEWALS_PER_TIMEOUT
from celery_dislock.exceptions import DamagedLockError, StoreError
from celery_dislock.parking.store import FIRST
from celery_dislock.servers.replies import Granted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from celery_dislock.config.options import TaskOptions
    from celery_dislock.parking.process import ParkingProcess

PAGE = 100  # lines per step, which blocks the worker's event loop

logger = logging.getLogger("celery_dislock")


def interval(tasks: Iterable[TaskOptions]) -> float | None:
    """
    Return the number of seconds within which all lines are swept once; None if there are no tasks.

    The shortest timeout of the tasks that park decides.  If no task parks, all tasks count, because
    tasks that used to park may have left a line.
    """
    known = list(tasks)
    timeouts = [options.timeout for options in [one for one in known if one.parks] or known]
    return min(timeouts) / RENEWALS_PER_TIMEOUT if timeouts else None


class Sweep:
    """
    Sweeps the lines of one broker, a page per step.

    Use it from one thread only.

    Args:
        process: The store and lines to use; no other thread may use their connections.
        name: Name in Redis of the lock under which one worker at a time sweeps.
        worker: Name of this worker, for messages.
        every: Seconds within which all lines are swept once.
        looks_first: Check that there are any lines before taking the lease.  If a worker's tasks do
            not park, there usually are none.
        clock: Monotonic clock, in seconds.

    Attributes:
        tell: Called with the tasks that were ended because others took their place: why, by id.
    """

    def __init__(
        self,
        process: ParkingProcess,
        name: str,
        worker: str,
        every: float,
        *,
        looks_first: bool = False,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._process = process
        self._clock = clock
        self._name = name
        self._owner = process.owner_name(f"{worker}:{process.pid}/")
        self._holder = json.dumps({"task": "sweep", "worker": worker, "pid": process.pid})
        self._every = every
        self._looks_first = looks_first
        self.tell: Callable[[Mapping[str, str]], None] = lambda _replaced: None
        self._cursor = FIRST
        self._sweeps = False  # it has the lease

    def step(self) -> float:
        """
        Sweep one page of lines, unless another worker sweeps; blocks for a few round trips.

        Errors are logged, and the next step tries again.

        Returns:
            Seconds until the next step is due.
        """
        began, swept_before = self._clock(), self._sweeps
        try:
            pages = self._look()
        except StoreError as exc:
            self._process.lock_server_failed(exc)
            self._sweeps = False
        except Exception:
            logger.exception("The sweep of parked tasks failed, and will be tried again.")
        else:
            self._process.lock_server_answered(took=self._sweeps and not swept_before)
            # The interval includes the time that this step took.
            return max(0.0, self._every / pages - (self._clock() - began))
        self._cursor = FIRST
        return self._every

    def _look(self) -> int:
        """Sweep one page; return the number of pages."""
        process = self._process
        if self._looks_first and self._cursor == FIRST and not process.lines.page(FIRST, 1)[0]:
            return 1
        ttl = 2 * self._every  # expires before the lease of a task that dies with this worker
        if not isinstance(
            process.store.acquire([self._name], self._owner, ttl, self._holder), Granted
        ):
            self._cursor, self._sweeps = FIRST, False
            return 1
        self._sweeps = True
        is_first = self._cursor == FIRST
        total, self._cursor, found = process.lines.page(self._cursor, PAGE)
        for lock, swept in process.lines.sweep(list(found)).items():
            if isinstance(swept, DamagedLockError):
                process.lock_server_failed(swept)
                continue
            replaced = process.tell_replaced(lock, swept.replaced)
            if replaced:
                self.tell(replaced)
            process.end_unclaimed(lock, swept.unclaimed)
            if not swept.parked and not swept.replaced:
                process.lines.delist(lock, found[lock])
        if is_first and total:
            self._confirm_name()
        return 1 if total < PAGE else 2 + total // PAGE  # one more, as page sizes vary

    def _confirm_name(self) -> None:
        """Keep the store's name, which ends by itself; the lines do not wait for that."""
        try:
            self._process.identity.confirm()
        except StoreError as exc:  # damaged, or it has no name yet and the server is full
            self._process.lock_server_failed(exc)

    def end(self) -> None:
        """Release the lease, so that another worker can sweep."""
        with contextlib.suppress(StoreError):  # the lease expires by itself
            self._process.store.release([self._name], self._owner)
        self._process.store.close()
