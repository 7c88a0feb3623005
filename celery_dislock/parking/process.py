"""The locks of one process of an app that can park tasks, with the lines of parked tasks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from celery_dislock.locks.runtime import Process, Runtime
from celery_dislock.messages.delivery import end_reservation
from celery_dislock.messages.headers import reservation_of
from celery_dislock.parking.publisher import Publisher
from celery_dislock.parking.store import Lines
from celery_dislock.scripts.names import sweep_lock

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from celery import Celery
    from celery.app.task import Context

    from celery_dislock.config.settings import AppSettings
    from celery_dislock.servers.replies import Turn


class ParkingProcess(Process):
    """
    The locks of one process of an app, and the lines of its broker.

    Args:
        conf: The app's configuration.
        settings: The app's checked settings.
        publisher: Publishes parked tasks; None if no task can be parked.  Not used with several
            independent lock servers, which keep no lines.

    Attributes:
        can_park: Whether tasks can be parked: there is a publisher, and the server keeps lines.
        lines: The parked tasks of this broker.
        sweep_name: Name in Redis of the lock under which one worker at a time sweeps.
    """

    def __init__(
        self, conf: Mapping[str, Any], settings: AppSettings, publisher: Publisher | None
    ) -> None:
        home = publisher.home if publisher else ""
        super().__init__(conf, settings, home=home, hand_over=self._hand_over)
        self._publisher = publisher if self.store.lock_server.keeps_lines else None
        self.can_park = self._publisher is not None
        home, prefix = self.store.home, settings.dislock_prefix
        self.lines = Lines(self.store.lock_server, prefix, home, self._hand_over)
        self.sweep_name = sweep_lock(prefix, home)

    def _hand_over(self, turns: Sequence[Turn]) -> None:
        if self._publisher is not None:
            self._publisher.hand_over(self.lines, turns)

    def tell_replaced(
        self, lock: str, replaced: Mapping[str, bytes], by: str = ""
    ) -> Mapping[str, str]:
        """
        End tasks that were replaced by newer ones in the line of this lock.

        Args:
            lock: Name of the lock in Redis.
            replaced: Their messages, by ticket.
            by: Id of the task that took their places; empty: it is not known here.

        Returns:
            Why they end, by task id.  The caller sends an event for each.
        """
        if self._publisher is None:
            return {}
        return self._publisher.tell_replaced(self.lines, lock, replaced, self.end_reservation, by)

    def end_reservation(self, request: Context) -> None:
        """
        End the reservation that a message brings, if it brings one; logs a StoreError.

        Blocks for a second at most.

        Args:
            request: The request of a delivery, or one that was made of a message's headers.
        """
        reservation = reservation_of(request, self.settings.dislock_prefix)
        if reservation is not None:
            what = f"{getattr(request, 'task', '?')}[{request.id}]"
            end_reservation(self.quick_store.reservations, reservation, what)

    def end_unclaimed(self, lock: str, tickets: Sequence[str]) -> None:
        """Set aside parked tasks of this lock that have a result but do not claim their turns."""
        if tickets and self._publisher is not None:
            self._publisher.end_unclaimed(self.lines, lock, tickets)


def runtime_of(app: Celery) -> Runtime[ParkingProcess]:
    """Return the runtime that all locks of this app share; each app has its own."""
    try:
        runtime: Runtime[ParkingProcess] = app.__dict__["_dislock_runtime"]
    except KeyError:
        new = Runtime(
            partial(getattr, app, "conf"), partial(ParkingProcess, publisher=Publisher(app))
        )
        runtime = app.__dict__.setdefault("_dislock_runtime", new)
    return runtime
