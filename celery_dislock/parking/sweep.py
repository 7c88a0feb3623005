"""Hand on the locks of lines that nobody else hands on.

A holder that crashed hands nothing on, and a process may die before it has published a parked task.
So one worker at a time, under a lease of its own, looks through the lines of its broker, a page at
a time in its event loop: each line once within a third of the watchdog timeout.  Each line costs a
script; a line whose lock is held is left as it is.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from typing import TYPE_CHECKING

from celery_dislock.exceptions import DamagedLockError, StoreError
from celery_dislock.locks.lease import RENEWALS_PER_TIMEOUT
from celery_dislock.servers.replies import Granted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from celery_dislock.config.options import TaskOptions
    from celery_dislock.parking.process import ParkingProcess

PAGE = 100  # lines that are looked at in one go: the event loop waits for them
FIRST = b"0"  # cursor of the first page

logger = logging.getLogger("celery_dislock")


def interval(tasks: Iterable[TaskOptions]) -> float | None:
    """
    Return in how many seconds all lines are looked at once; None if there are no tasks.

    The tasks that park decide.  Where none does, a line may have been left by those that did.
    """
    known = list(tasks)
    timeouts = [
        options.lock_expire or options.lock_watchdog_timeout
        for options in [one for one in known if one.parks] or known
    ]
    return min(timeouts) / RENEWALS_PER_TIMEOUT if timeouts else None


class Sweep:
    """
    Looks through the lines of one broker, whenever it is called.

    For one thread only.

    Args:
        process: A store of its own: no other thread may use its connections.
        name: The lease under which one worker at a time sweeps: its name in Redis.
        worker: Who sweeps, for messages.
        every: Seconds in which all lines are looked at once.
        looks_first: Look whether there are lines before the lease is taken: in a worker whose tasks
            do not park there most often are none.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        process: ParkingProcess,
        name: str,
        worker: str,
        every: float,
        *,
        looks_first: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._process = process
        self._clock = clock
        self._name = name
        self._owner = process.owner_name(f"{worker}:{process.pid}/")
        self._holder = json.dumps({"task": "sweep", "worker": worker, "pid": process.pid})
        self._every = every
        self._looks_first = looks_first
        self._cursor = FIRST

    def step(self) -> float:
        """
        Look at a page of lines, where no other worker does; blocks for a few round trips.

        Whatever goes wrong is logged: the next step goes on.

        Returns:
            Seconds until the next step is due.
        """
        began = self._clock()
        try:
            pages = self._look()
        except StoreError as exc:
            self._process.lock_server_failed(exc)
        except Exception:
            logger.exception("Could not look through the lines of parked tasks; trying again.")
        else:
            self._process.lock_server_answered()
            # What the step took is part of its time.
            return max(0.0, self._every / pages - (self._clock() - began))
        self._cursor = FIRST
        return self._every

    def _look(self) -> int:
        """Look at a page; return how many there are."""
        process = self._process
        if self._looks_first and self._cursor == FIRST and not process.lines.any():
            return 1
        ttl = 2 * self._every  # over before the lease of a task that died with this worker
        if not isinstance(
            process.store.acquire([self._name], self._owner, ttl, self._holder), Granted
        ):
            self._cursor = FIRST
            return 1
        total, self._cursor, found = process.lines.page(self._cursor, PAGE)
        for lock, swept in process.lines.sweep(list(found)).items():
            if isinstance(swept, DamagedLockError):
                process.lock_server_failed(swept)
                continue
            process.tell_replaced(lock, swept.replaced)
            process.end_unclaimed(lock, swept.unclaimed)
            if not swept.parked and not swept.replaced:
                process.lines.delist(lock, found[lock])
        return 1 if total < PAGE else 2 + total // PAGE  # one more: pages are uneven

    def end(self) -> None:
        """Let another worker sweep."""
        with contextlib.suppress(StoreError):  # it ends by itself
            self._process.store.release([self._name], self._owner)
        self._process.store.close()
