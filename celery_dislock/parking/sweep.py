"""Hand off free locks that have tasks in line but were not handed off.

A holder that crashed does not hand off its lock, and a process may die before it has published a
parked task.  Therefore one worker at a time sweeps the lines of its broker, under a lease of its
own.  The sweep runs in the worker's timer, some lines at a time, and visits each line once within
a third of the watchdog timeout.  Each line costs one script call.  A line whose lock is held is
left as it is.

The task that is first in line goes by the terms that the code of this worker says by now.  So a
line follows a deploy, even if no new task comes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from typing import TYPE_CHECKING

from celery_dislock.clock import monotonic
from celery_dislock.config.options import RENEWALS_PER_TIMEOUT
from celery_dislock.config.terms import terms_text
from celery_dislock.exceptions import DamagedLockError, StoreError
from celery_dislock.keys.templates import key_of
from celery_dislock.messages.broker import BACKEND_WITHIN
from celery_dislock.parking.epoch import Epoch, log_loss
from celery_dislock.parking.store import FIRST
from celery_dislock.servers.records import describe, write_holder
from celery_dislock.servers.replies import Granted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from celery_dislock.config.options import TaskOptions
    from celery_dislock.config.terms import Terms
    from celery_dislock.parking.answers import Head
    from celery_dislock.parking.process import ParkingProcess
    from celery_dislock.parking.store import Lines

MOST = 10.0  # maximum seconds between two visits; turns are given 15 s before a rate admits them
RESTS_AFTER = 4  # times as long as a failed step took, the next one comes
PAGE = 100  # lines per step at most; a step blocks the worker's event loop

logger = logging.getLogger("celery_dislock")


def interval(tasks: Iterable[TaskOptions]) -> float | None:
    """
    Return the number of seconds within which all lines are swept once; None if there are no tasks.

    The shortest timeout of the tasks that park decides.  If no task parks, all tasks count, because
    tasks that used to park may have left a line.
    """
    known = list(tasks)
    timeouts = [
        options.timeout for options in [options for options in known if options.parks] or known
    ]
    return min(MOST, min(timeouts) / RENEWALS_PER_TIMEOUT) if timeouts else None


class Round:
    """
    The lines that one round of the sweep visits: each once.

    A page of the index may have more names than were asked for: Redis returns a small hash whole.

    Args:
        lines: The parked tasks of one broker.
        until: Time of the sweep's clock at which the next round begins.

    Attributes:
        total: Number of lines, as the last page said.
        parked: Number of tasks that are parked in the lines visited so far.
    """

    def __init__(self, lines: Lines, until: float) -> None:
        self.until = until
        self.total = self.parked = 0
        self._lines = lines
        self._cursor: bytes | None = None  # FIRST: all pages were read
        self._seen: set[str] = set()
        self._waiting: list[tuple[str, bytes]] = []

    def take(self) -> dict[str, bytes]:
        """
        Return the lines to visit now, PAGE at most, with their numbers in the index.

        Blocks for a round trip at most.

        Raises:
            StoreError: The server did not answer.
        """
        if len(self._waiting) < PAGE and self._cursor != FIRST:
            self.total, self._cursor, page = self._lines.page(self._cursor or FIRST, PAGE)
            self._waiting += [(lock, page[lock]) for lock in page if lock not in self._seen]
            self._seen.update(page)
        now, self._waiting = self._waiting[:PAGE], self._waiting[PAGE:]
        return dict(now)

    @property
    def steps_left(self) -> int:
        """Number of steps that are still to come; 0: all lines were visited."""
        to_read = 0 if self._cursor == FIRST else max(1, self.total - len(self._seen))
        return math.ceil((to_read + len(self._waiting)) / PAGE)


class Sweep:
    """
    Sweeps the lines of one broker, some of them per step.

    Use it from one thread only.

    Args:
        process: The store and lines to use; no other thread may use their connections.
        worker: Name of this worker, for messages.
        every: Seconds within which all lines are swept once.
        looks_first: Check that there are any lines before taking the lease.  If a worker's tasks do
            not park, there usually are none.
        clock: Monotonic clock, in seconds.

    Attributes:
        tell: Called with the tasks that were ended because others replaced them: the reasons, by
            task id.
        says: Called with a task's name and a key: the terms that the task's code says of it; None
            if that is not known without the task's arguments.
    """

    def __init__(
        self,
        process: ParkingProcess,
        worker: str,
        every: float,
        *,
        looks_first: bool = False,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._process = process
        self._clock = clock
        self._owner = process.owner_name(f"{worker}:{process.pid}/")
        self._holder = write_holder(describe({"task": "sweep"}, worker, process.pid, None))
        self._every = every
        self._looks_first = looks_first
        self.tell: Callable[[Mapping[str, str]], None] = lambda _replaced: None
        self.says: Callable[[str, str], Terms | None] = lambda _task, _key: None
        server, broker = process.store.lock_server, process.store.broker
        self._epoch = Epoch(server, process.settings.dislock_prefix, broker)
        self._round: Round | None = None  # None: a round begins with the next step
        self._sweeps = False  # whether this worker has the lease

    def step(self) -> float:
        """
        Sweep PAGE lines at most, unless another worker sweeps; blocks for a few round trips.

        Errors are logged, and the next step tries again.

        Returns:
            Seconds until the next step is due.
        """
        began, swept_before = self._clock(), self._sweeps
        try:
            due = self._look(began)
        except StoreError as exc:
            self._process.lock_server_failed(exc)
            self._sweeps = False
        except Exception:
            #: ERROR: A bug in this package. -> Report the traceback.
            logger.exception("The sweep of parked tasks failed, and will be tried again.")
        else:
            self._process.lock_server_answered(took=self._sweeps and not swept_before)
            return max(0.0, due - self._clock())
        self._round = None
        # A server that hangs costs the worker's event loop some seconds each time.
        return max(self._every, RESTS_AFTER * (self._clock() - began))

    def _look(self, now: float) -> float:
        """Sweep the lines that are next; return the time at which the step after that is due."""
        process, later = self._process, now + self._every
        if self._looks_first and self._round is None and not process.lines.page(FIRST, 1)[0]:
            if self._epoch.is_known:
                log_loss(self._epoch.look())
            return later
        ttl = 2 * self._every  # expires before the lease of a task that dies with this worker
        asked = [process.sweep_name], self._owner, ttl, self._holder
        if not isinstance(process.store.acquire(*asked), Granted):
            self._round, self._sweeps = None, False
            log_loss(self._epoch.look())
            return later
        self._sweeps = True
        this = self._round = self._round or Round(process.lines, until=later)
        page = this.take()
        if newer := self._sweep(this, page):
            self._sweep(this, {lock: page[lock] for lock in newer}, newer)
        left = this.steps_left
        if not left:
            self._round = None
            log_loss(self._epoch.look(this.parked))
        return now + (this.until - now) / (left + 1)

    def _sweep(
        self,
        this: Round,
        found: Mapping[str, bytes],
        newer: Mapping[str, Sequence[Sequence[str]]] | None = None,
    ) -> Mapping[str, Sequence[Sequence[str]]]:
        """Sweep these lines; return those whose first tasks have other terms than the code's."""
        process, publisher = self._process, self._process.publisher
        others = {}
        for lock, swept in process.lines.sweep(list(found), newer).items():
            if isinstance(swept, DamagedLockError):
                process.lock_server_failed(swept)
                continue
            if newer is None:
                this.parked += swept.parked
            if swept.replaced:
                told = publisher.tell_replaced(lock, swept.replaced, within=BACKEND_WITHIN)
                if told:
                    self.tell(told)
            if swept.unclaimed:
                publisher.end_unclaimed(lock, swept.unclaimed)
            for circle in swept.circles:
                #: WARNING: Two tasks, or two versions of the code, pass the same keys in different
                #: orders; one comes again last. -> Give the keys the same limits in all tasks;
                #: after a deploy it stops by itself.
                logger.warning(
                    "Tasks wait for each other, as they take their locks in different orders: %s. "
                    "%s gives back what it has, and comes again at the end of the line.",
                    *(" and ".join(circle.tasks), circle.began_anew),
                )
            if not swept.parked and not swept.replaced:
                process.lines.delist(lock, found[lock])
            if follows := [other for head in swept.first if (other := self._newer(head))]:
                others[lock] = follows
        return others

    def _newer(self, first: Head) -> Sequence[str]:
        """Return what sweep.lua is given of a task whose code says other terms; else nothing."""
        terms = self.says(json.loads(f"{{{first.task}}}")["task"], key_of(first.lock))
        word = terms_text((terms,)) if terms is not None else first.terms
        return [*first, word] if word != first.terms else ()

    def end(self) -> None:
        """Release the lease, so that another worker can sweep."""
        with contextlib.suppress(StoreError):  # the lease expires by itself
            self._process.store.release([self._process.sweep_name], self._owner)
        self._process.store.close()
