"""The command by which a worker learns that a newer task may wait for one of its tasks to end."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from celery.worker import state

from celery_dislock.keys.names import shown_id
from celery_dislock.locks.interruption import SIGNAL
from celery_dislock.parking.process import runtime_of
from celery_dislock.tasks.request import is_child


def look(control: Any, task_id: str = "", **_kwargs: Any) -> None:
    """
    Have the process that runs a task renew its lease now, and so see what the lock server says.

    A pool process is sent the signal by which its watchdog interrupts bodies; see
    :mod:`celery_dislock.locks.interruption`.  Without a body to interrupt it is ignored.
    """
    runtime = runtime_of(control.app)
    if runtime.off:
        return
    runtime.process.watchdog.look_at(task_id)
    for request in list(state.active_requests):
        if shown_id(request.id) == task_id and is_child(request.worker_pid) and SIGNAL is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(request.worker_pid, SIGNAL)
