"""Keep the reservations of messages that this worker has, and that no lease is renewed with.

A worker may keep a message for long before its task begins: it was prefetched, or has an ETA.  Its
reservation would expire meanwhile, and a second message of the key would be sent.  So the main
process renews the reservations of the messages that it has, in one pipelined round trip.  So it
does for tasks that run without a lock, or with several: others renew theirs with their lease.

A reservation that is missed costs a second message, and nothing else.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from celery import bootsteps
from celery.worker import state

from celery_dislock.exceptions import StoreError
from celery_dislock.messages.headers import UNIQUE_HEADER, reservation_of
from celery_dislock.tasks.task import runtime_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from celery.worker import WorkController

    from celery_dislock.servers.reservations import Reservation

RENEWALS = 4  # in the shortest lock_unique_for of the tasks
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
            guard.options.lock_unique_for
            for task in worker.app.tasks.values()
            if (guard := getattr(task, "dislock_guard", None)) is not None
            and guard.options.lock_unique_until is not None
        ]
        self._every = min(times, default=0.0) / RENEWALS
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
            if reservation.until != "expiry":
                yield reservation

    def _running(self, requests: Iterable[Any]) -> Iterable[Reservation]:
        for request in requests:
            reservation = self._reservation_of(request)
            if reservation is None or not request.task.dislock_guard.main_process_keeps:
                continue
            if reservation.until == "end":
                yield reservation

    def _reservation_of(self, request: Any) -> Reservation | None:
        guard = getattr(request.task, "dislock_guard", None)
        if guard is None or UNIQUE_HEADER not in (request.message.headers or ()):
            return None
        prefix, ttl = self._runtime.settings.dislock_prefix, guard.options.lock_unique_for
        return reservation_of(request._context, prefix, ttl)  # noqa: SLF001

    def stop(self, _worker: WorkController) -> None:
        """Stop renewing: the broker delivers what this worker still has to another."""
        if self._entry is not None:
            self._entry.cancel()
            self._store.close()
