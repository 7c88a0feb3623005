"""The locks of one process of an app that can park tasks, with the lines of parked tasks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from celery._state import get_current_task

from celery_dislock.locks.runtime import Process, Runtime
from celery_dislock.messages.broker import own_producers
from celery_dislock.messages.delivery import traced
from celery_dislock.parking.publisher import Publisher, broker_digest
from celery_dislock.parking.store import Lines
from celery_dislock.scripts.names import sweep_lock
from celery_dislock.servers.bridge import wait_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from celery import Celery

    from celery_dislock.config.settings import AppSettings
    from celery_dislock.servers.replies import Turn


class ParkingProcess(Process):
    """
    The locks of one process of an app, and the lines of its broker.

    Args:
        conf: The app's configuration.
        settings: The app's checked settings.
        app: The app.

    Attributes:
        can_park: Whether tasks can be parked: several independent lock servers keep no lines.
        lines: The parked tasks of this broker.
        publisher: Publishes them.
        sweep_name: Name in Redis of the lock under which one worker at a time sweeps.
    """

    def __init__(self, conf: Mapping[str, Any], settings: AppSettings, app: Celery) -> None:
        super().__init__(conf, settings, broker=broker_digest(app), hand_over=self._hand_over)
        self._app = app
        self.can_park = self.store.lock_server.keeps_lines
        broker, prefix = self.store.broker, settings.dislock_prefix
        self.lines = Lines(self.store.lock_server, prefix, broker, self._hand_over)
        self.publisher = Publisher(app, self.lines)
        self.sweep_name = sweep_lock(prefix, broker)

    def _hand_over(self, turns: Sequence[Turn]) -> None:
        self.publisher.hand_over(turns)

    def close(self) -> None:
        """Close the connections to the broker, too; see :meth:`Process.close`."""
        super().close()
        own_producers(self._app).close()

    def running(self, *, on_loop: bool) -> tuple[str, object, str | None] | None:
        """See :meth:`celery_dislock.locks.runtime.Process.running`."""
        # Celery's stack of tasks is that of the loop's greenlet.
        return wait_for(_running_on_loop()) if on_loop else _running()


def _running() -> tuple[str, object, str | None] | None:
    here = traced.get()
    task = get_current_task() if here is None else here.task
    if task is None:
        return None
    request = task.request if here is None else here.request
    return None if request.called_directly else (task.name, request.id, request.hostname)


async def _running_on_loop() -> tuple[str, object, str | None] | None:
    return _running()


def runtime_of(app: Celery) -> Runtime[ParkingProcess]:
    """Return the runtime that all locks of this app share; each app has its own."""
    try:
        runtime: Runtime[ParkingProcess] = app.__dict__["_dislock_runtime"]
    except KeyError:
        new = Runtime(partial(getattr, app, "conf"), partial(ParkingProcess, app=app))
        runtime = app.__dict__.setdefault("_dislock_runtime", new)
    return runtime
