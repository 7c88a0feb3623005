"""The watchdog of one process: one loop, and the jobs that keep its leases alive.

The leases are renewed first.  What could not be released comes second.  The observer comes last,
and waits while renewals fail: the server is away, and the time is needed for leases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_dislock.clock import FOREVER, monotonic
from celery_dislock.locks.clearing import Clearing
from celery_dislock.locks.loop import WITHIN_MOST, Loop
from celery_dislock.locks.observer import Observer
from celery_dislock.locks.renewals import Renewals
from celery_dislock.locks.reports import Reports

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery_dislock.servers.store import Store


class Watchdog(Loop):
    """
    Keeps the leases of this process alive.

    Args:
        store: Sends the renewals.
        clock: Returns monotonic seconds.
        threaded: See :class:`Loop`.
        beside_greenlets: The store belongs to the loop alone, and reports are made in a greenlet.
        asks: See :class:`Renewals`.
        observer: What is told of the leases, and run by the loop; None: nobody.

    Attributes:
        renewals: The job that renews leases.
        clearing: The job that releases what could not be released.
        reports: Reports what happens to leases, to the observer among others.
    """

    def __init__(
        self,
        store: Store,
        *,
        clock: Callable[[], float] = monotonic,
        threaded: bool = True,
        beside_greenlets: bool = False,
        asks: bool = False,
        observer: Observer | None = None,
    ) -> None:
        super().__init__(
            clock=clock, threaded=threaded, beside_greenlets=beside_greenlets, close=self._end
        )
        self._store = store
        self._close_store = beside_greenlets  # then the connections belong to the thread's own hub
        self.reports = Reports(observer or Observer())
        self.renewals = Renewals(self, store, self.reports, asks=asks)
        self.clearing = Clearing(self, store)
        observing = Observing(self, self.reports.observer, self.renewals)
        self.jobs = [self.renewals, self.clearing, observing]

    def __len__(self) -> int:
        """Return the number of leases that are renewed."""
        return len(self.renewals)

    def _end(self) -> None:
        if self.clearing.due_at() < FOREVER:
            self.clearing.run(self.clock())
        if self._close_store:
            self._store.close()


class Observing:
    """The job that runs the observer when it is due, unless renewals fail."""

    def __init__(self, loop: Loop, observer: Observer, renewals: Renewals) -> None:
        self._loop = loop
        self._observer = observer
        self._renewals = renewals
        observer.wake = self._wake

    def _wake(self) -> None:
        self._loop.wake(self._observer.due_at())

    def due_at(self) -> float:
        """Return when the observer is due."""
        if self._renewals.failures and len(self._renewals):
            return FOREVER
        return self._observer.due_at()

    def run(self, now: float) -> None:  # noqa: ARG002 -- a job
        """Let the observer do what it has to do."""
        self._loop.ask("running the observer", WITHIN_MOST / 2, self._observer.run)
