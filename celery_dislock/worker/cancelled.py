"""The command by which a worker learns that a newer task may wait for one of its tasks to end."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from celery.worker import state

from celery_dislock.keys.names import shown_id
from celery_dislock.locks.interruption import SIGNAL
from celery_dislock.parking.process import runtime_of
from celery_dislock.tasks.request import is_child

if TYPE_CHECKING:
    from celery import Celery


AGAIN = 1.0  # seconds after which a process looks again: at first its body may not have begun


def renew_if_superseded(control: Any, task_id: str = "", **_kwargs: Any) -> None:
    """
    Have the process that runs a task renew its lease now, and so see what the lock server says.

    A pool process is sent the signal by which its watchdog interrupts bodies; see
    :mod:`celery_dislock.locks.interruption`.  Without a body to interrupt it is ignored.
    """
    if not runtime_of(control.app).off:
        _look(control.app, task_id)
        control.consumer.timer.call_after(AGAIN, _look, (control.app, task_id))


def _look(app: Celery, task_id: str) -> None:
    runtime_of(app).process.watchdog.look_at(task_id)
    for request in list(state.active_requests):
        if shown_id(request.id) == task_id and is_child(request.worker_pid) and SIGNAL is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(request.worker_pid, SIGNAL)
