"""Where does a parked task stand in line?  For an application's own pages, as "3rd in line"."""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_dislock.exceptions import DislockError
from celery_dislock.operating.why.asked import ask_backend
from celery_dislock.parking.answers import PARKED
from celery_dislock.servers.find import find_place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from celery import Celery

    from celery_dislock.locks.runtime import Runtime
    from celery_dislock.parking.process import ParkingProcess
    from celery_dislock.servers.waiters import Place


def place_in_line(
    app: Celery | None, runtime: Runtime[ParkingProcess], task_id: str, keys: Sequence[str]
) -> Place | None:
    """Tell where a task stands in line; see :meth:`celery_dislock.Dislock.place`."""
    if not keys:
        stored = ask_backend(app, task_id, errors=False)
        if stored.unknown:
            told = f"the result of task {task_id} cannot be asked for: {stored.unknown}"
            raise DislockError(f"{told}. To know its place without it, give the key of its lock")
        if stored.state != PARKED or stored.first is None:
            return None
        keys = [stored.first]
    return find_place(runtime.process.store.lock_server, runtime.lock_names(keys), task_id)
