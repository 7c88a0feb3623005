"""The watchdog of one process: one loop, and the jobs that keep its leases alive.

The leases are renewed first.  What could not be released comes second.  The channel's watchers come
last, and wait while renewals fail: the server is away, and the time is needed for leases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_dislock.clock import FOREVER, monotonic
from celery_dislock.locks.channel import Channel
from celery_dislock.locks.clearing import Clearing
from celery_dislock.locks.loop import WITHIN_MOST, Loop
from celery_dislock.locks.renewals import Renewals

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
        channel: Is told of the leases, and has work for the loop; None: nobody watches.

    Attributes:
        renewals: The job that renews leases.
        clearing: The job that releases what could not be released.
        channel: Is told what happens to leases.
    """

    def __init__(
        self,
        store: Store,
        *,
        clock: Callable[[], float] = monotonic,
        threaded: bool = True,
        beside_greenlets: bool = False,
        asks: bool = False,
        channel: Channel | None = None,
    ) -> None:
        super().__init__(
            clock=clock, threaded=threaded, beside_greenlets=beside_greenlets, close=self._end
        )
        self._store = store
        self._close_store = beside_greenlets  # then the connections belong to the thread's own hub
        self.channel = channel or Channel()
        self.renewals = Renewals(self, store, self.channel, asks=asks)
        self.clearing = Clearing(self, store)
        observing = Observing(self, self.channel, self.renewals)
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
    """The job that does the work of the watchers when it is due, unless renewals fail."""

    def __init__(self, loop: Loop, channel: Channel, renewals: Renewals) -> None:
        self._loop = loop
        self._channel = channel
        self._renewals = renewals
        channel.wake = self._wake

    def _wake(self) -> None:
        self._loop.wake(self._channel.due_at())

    def due_at(self) -> float:
        """Return when the watchers have work."""
        if self._renewals.failures and len(self._renewals):
            return FOREVER
        return self._channel.due_at()

    def run(self, now: float) -> None:  # noqa: ARG002 -- a job
        """Let the watchers do their work."""
        self._loop.ask("running telemetry", WITHIN_MOST / 2, self._channel.run)
