"""Keep what waits in this worker: reservations of messages and turns of parked tasks.

A worker may keep a message for long before its task begins: it was prefetched, had an ETA, or waits
for Celery's ``rate_limit``.  Its reservation would expire meanwhile, and a second message of the
key would be sent.  So the main process renews the reservations of the messages that it has, in one
pipelined round trip.

It renews those of running tasks, too, also while the worker shuts down: such a task may have no
lease, or its process was stopped.  The watchdog renews them as well, because this timer may have to
wait for a body: in a solo pool, or beside a greenlet that does not yield.

In the same way it keeps the turns of parked tasks that wait for their ``rate_limit``.  A turn that
runs out is given again, and each copy of its message takes a token of the limit.  Turns of other
messages are not kept: one that waits here behind a long body runs sooner in an idle worker.

A reservation that is not renewed costs a second message, and a turn a copy; nothing else.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from celery.worker import state

from celery_dislock.exceptions import StoreError
from celery_dislock.messages.headers import TICKET, UNIQUE, notes_in, own_turn
from celery_dislock.parking.process import runtime_of
from celery_dislock.tasks.request import is_alive, is_child, rate_limited_requests
from celery_dislock.tasks.task import guards_of
from celery_dislock.worker.timed import LastingStep

if TYPE_CHECKING:
    from collections.abc import Iterator

    from celery.worker import WorkController

    from celery_dislock.servers.reservations import Reservation

RENEWALS = 4  # in the shortest time for which a reservation or a turn is kept
EVERY_LEAST = 0.5  # seconds
WITHIN = 0.5  # seconds to wait for the server's reply; the worker's event loop waits, too

logger = logging.getLogger("celery_dislock")


class WaitingStep(LastingStep):
    """Bootstep of a worker with tasks that are unique or park: keeps what waits in it."""

    label = "Dislock waiting"

    def include_if(self, worker: WorkController) -> bool:
        """Tell whether this worker has tasks that are unique when they are sent, or that park."""
        self._worker, guards = worker, guards_of(worker.app).values()
        times = [
            min(guard.options.lock_unique_for, guard.kept)
            for guard in guards
            if guard.options.lock_unique_until in {"start", "end"}
        ]
        times += [guard.timeout for guard in guards if guard.options.parks]
        self.every = max(min(times, default=0.0) / RENEWALS, EVERY_LEAST)
        return bool(times) and not runtime_of(worker.app).off

    def connect(self) -> None:
        """Make connections that nothing else uses."""
        self._process = runtime_of(self._worker.app).new_process()

    def work(self) -> None:
        """Keep what waits, and the reservations of what runs."""
        is_here = self._entry is not None  # else another worker will have what waits
        kept = {False: list(self._waiting()) if is_here else [], True: list(self._running())}
        turns = list(self._turns()) if is_here and self._process.can_park else []
        try:
            for runs, reservations in kept.items():
                if reservations:
                    self._process.store.reservations.keep(reservations, runs=runs, within=WITHIN)
            if turns:
                self._process.lines.keep_turns(turns, within=WITHIN)
        except StoreError as exc:
            logger.debug("What waits in this worker is not kept on the lock server: %s", exc)

    def end(self) -> None:
        """Renew no more what waits: the broker delivers it to another worker."""
        self._process.store.close()
        super().end()

    def _waiting(self) -> Iterator[Reservation]:
        reserved = set(state.reserved_requests) - set(state.active_requests)
        for request in [*reserved, *rate_limited_requests(self._worker.consumer)]:
            reservation = self._reservation_of(request)
            if reservation and reservation.until != "expiry" and request.id not in state.revoked:
                yield reservation._replace(ttl=request.task.dislock_guard.options.lock_unique_for)

    def _turns(self) -> Iterator[tuple[str, str]]:
        """
        Return the turns whose messages wait for a limit, by lock and ticket.

        A copy of a task that is revoked or has expired is discarded as soon as it comes.
        """
        prefix = self._process.settings.dislock_prefix
        for request in rate_limited_requests(self._worker.consumer):
            if TICKET not in notes_in(request.message.headers):
                continue
            turn = own_turn(request._context, prefix)  # noqa: SLF001 -- Celery has no public name
            if turn and request.id not in state.revoked and not request.maybe_expire():
                yield turn

    def _running(self) -> Iterator[Reservation]:
        for request in list(state.active_requests):
            reservation = self._reservation_of(request)
            if reservation and reservation.until == "end" and not _is_dead(request.worker_pid):
                yield reservation

    def _reservation_of(self, request: Any) -> Reservation | None:
        guard = getattr(request.task, "dislock_guard", None)
        if guard is None or UNIQUE not in notes_in(request.message.headers):
            return None
        reservation: Reservation | None = guard.reservation_of(request._context)  # noqa: SLF001
        return reservation


def _is_dead(pid: int | None) -> bool:
    """
    Tell whether a task's pool process has died, of which Celery may have told nothing.

    Before 5.6.3, Celery forgets what its pool runs when it loses the broker.  Such a task stays
    among the active ones for good.
    """
    return pid is not None and is_child(pid) and not is_alive(pid)
