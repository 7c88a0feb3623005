"""Cancel a task that runs, for the newest task of its key: ``lock_on_conflict="cancel"``.

A newcomer that is parked marks the lease in its way on the lock server.  The holder finds the mark
when it renews the lease; its worker is told by remote control to do so now.  The message says no
more than that, so nobody is cancelled by a forged one.  The body is then stopped as
``lock_on_cancel`` says, and the newcomer gets its turn when the lease has ended.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from celery.exceptions import Ignore, Reject, Retry

from celery_dislock.exceptions import SupersededError
from celery_dislock.locks.interruption import StopTask
from celery_dislock.redaction import reason_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from celery import Celery

    from celery_dislock.locks.lease import Lease

LOOK = "dislock_look"  # the command for a worker
CAUSES_MOST = 20  # of an exception, one behind the other

logger = logging.getLogger("celery_dislock")


def tell_workers(app: Celery, holders: Iterable[Mapping[str, Any]]) -> None:
    """
    Have the workers of these holders look whether a newer task waits for theirs.

    If the broker does not take the command, their next renewal tells.
    """
    for holder in holders:
        task_id, worker = holder.get("id"), holder.get("worker")
        if not isinstance(task_id, str) or not isinstance(worker, str):
            continue
        try:
            app.control.broadcast(LOOK, {"task_id": task_id}, destination=[worker])
        except Exception as exc:  # noqa: BLE001 -- any of the broker's client
            logger.info(
                "Worker %s hears at its next renewal that task %s is cancelled: %s",
                *(worker, task_id, reason_of(exc)),
            )


def was_cancelled(lease: Lease | None, error: BaseException) -> bool:
    """Tell whether a body has ended with this because it was cancelled; a retry has, too."""
    if lease is None or lease.told_at is None or isinstance(error, (Ignore, Reject)):
        return False
    if isinstance(error, Retry):
        return True
    cause: BaseException | None = error
    for _ in range(CAUSES_MOST):
        if cause is None:
            return False
        if isinstance(cause, (SupersededError, StopTask)):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
