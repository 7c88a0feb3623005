"""Keep the reservations of the messages that this worker has, and of the tasks that it runs.

A worker may keep a message for long before its task begins: it was prefetched, or has an ETA.  Its
reservation would expire meanwhile, and a second message of the key would be sent.  So the main
process renews the reservations of the messages that it has, in one pipelined round trip.  So it
does for tasks that run: they may have no lease to renew theirs with, or be in a process that was
stopped.  The watchdog renews them as well, because this timer may wait for a body itself: in a solo
pool, or beside a greenlet that does not yield.

A reservation that is missed costs a second message, and nothing else.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from celery import bootsteps
from celery.worker import state

from celery_dislock.exceptions import StoreError
from celery_dislock.messages.headers import UNIQUE_HEADER
from celery_dislock.parking.process import runtime_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from celery.worker import WorkController

    from celery_dislock.servers.reservations import Reservation

RENEWALS = 4  # in the shortest time for which a reservation is kept
EVERY_LEAST = 0.5  # seconds
WITHIN = 0.5  # seconds to wait for the server's reply; the worker's event loop waits, too

logger = logging.getLogger("celery_dislock")


class ReservationStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """Bootstep of a worker with unique tasks: renews the reservations of waiting messages."""

    label = "Dislock reservations"
    # After the pool, because a pool without an event loop leaves the timer to a thread.
    requires = ("celery.worker.components:Timer", "celery.worker.components:Pool")

    def __init__(self, worker: WorkController, **kwargs: Any) -> None:
        super().__init__(worker, **kwargs)
        self._entry: Any = None

    def include_if(self, worker: WorkController) -> bool:
        """Tell whether this worker has tasks that are unique when they are sent."""
        runtime = runtime_of(worker.app)
        times = [
            min(guard.options.lock_unique_for, guard.kept)
            for task in worker.app.tasks.values()
            if (guard := getattr(task, "dislock_guard", None)) is not None
            and guard.options.lock_unique_until in {"start", "end"}
        ]
        self._every = max(min(times, default=0.0) / RENEWALS, EVERY_LEAST)
        return bool(times) and not runtime.off

    def start(self, worker: WorkController) -> None:
        """Renew again and again."""
        self._runtime = runtime_of(worker.app)
        self._store = self._runtime.new_process().store
        self._again(worker)

    def _again(self, worker: WorkController) -> None:
        self._entry = worker.timer.call_after(self._every, self._step, (worker,))

    def _step(self, worker: WorkController) -> None:
        self._again(worker)
        try:
            waiting = list(self._waiting(list(state.reserved_requests)))
            if waiting:
                self._store.reservations.keep(waiting, runs=False, within=WITHIN)
            running = list(self._running(list(state.active_requests)))
            if running:
                self._store.reservations.keep(running, runs=True, within=WITHIN)
        except StoreError as exc:
            logger.debug("Reservations of waiting messages are not renewed: %s", exc)
        except Exception:
            logger.exception("Reservations of waiting messages are not renewed.")

    def _waiting(self, requests: Iterable[Any]) -> Iterable[Reservation]:
        for request in requests:
            reservation = self._reservation_of(request)
            if reservation is None or request in state.active_requests:
                continue
            if reservation.until != "expiry" and request.id not in state.revoked:
                ttl = request.task.dislock_guard.options.lock_unique_for
                yield reservation._replace(ttl=ttl)

    def _running(self, requests: Iterable[Any]) -> Iterable[Reservation]:
        for request in requests:
            reservation = self._reservation_of(request)
            if reservation is not None and reservation.until == "end":
                yield reservation

    def _reservation_of(self, request: Any) -> Reservation | None:
        guard = getattr(request.task, "dislock_guard", None)
        if guard is None or UNIQUE_HEADER not in (request.message.headers or ()):
            return None
        reservation: Reservation | None = guard.reservation_of(request._context)  # noqa: SLF001
        return reservation

    def stop(self, _worker: WorkController) -> None:
        """Stop renewing: the broker delivers what this worker still has to another."""
        if self._entry is not None:
            self._entry.cancel()
            self._store.close()
