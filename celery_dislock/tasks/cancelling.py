"""Cancel a task that runs, for the newest task of its key: ``lock_on_conflict="cancel"``.

A newcomer that is parked marks the lease in its way on the lock server.  The holder finds the mark
when it renews the lease, and a command by remote control tells its worker to renew the lease now.
The command says nothing else, so a forged one cancels nobody.  The body is then stopped as
``lock_on_cancel`` says, and the newcomer gets its turn when the lease has ended.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from celery import states
from celery.app.task import Context
from celery.exceptions import Ignore, Reject, Retry, TaskRevokedError

from celery_dislock.exceptions import SupersededError
from celery_dislock.keys.names import execution_start
from celery_dislock.locks.interruption import StopTask
from celery_dislock.messages.broker import BACKEND_WITHIN, own_producers
from celery_dislock.messages.message import TaskSkipped, store_end
from celery_dislock.redaction import reason_of
from celery_dislock.servers.view import read_state
from celery_dislock.words import plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from celery import Celery

    from celery_dislock.locks.lease import Lease
    from celery_dislock.messages.broker import OwnProducer

LOOK_COMMAND = "dislock_look"  # name of the command for a worker
CAUSES_MOST = 20  # causes of an exception that are looked at, each the cause of the one before

logger = logging.getLogger("celery_dislock")


def tell_workers(app: Celery, holders: Iterable[Mapping[str, Any]]) -> None:
    """
    Have the workers of these holders ask whether a newer task waits for the holder to end.

    If the broker does not take the command, the next renewal of the holder's lease tells them.
    """
    for holder in holders:
        task_id, worker = holder.get("id"), holder.get("worker")
        if not isinstance(task_id, str) or not isinstance(worker, str):
            continue
        try:
            own_producers(app).send(partial(_tell_worker, app, task_id, worker))
        except Exception as exc:  # noqa: BLE001 -- any of the broker's client
            #: INFO: The broker did not take the message to that worker; the task is cancelled a
            #: third of its timeout later. -> Check the broker.
            logger.info(
                "Worker %s hears at its next renewal that task %s is cancelled: %s",
                *(worker, task_id, reason_of(exc)),
            )


def _tell_worker(app: Celery, task_id: str, worker: str, producer: OwnProducer) -> None:
    mailbox = app.control.mailbox(producer.connection)
    # Its public methods take a producer of the app's pool, which may be blocked.
    to = {"destination": [worker], "channel": producer.channel, "producer": producer}
    mailbox._publish(LOOK_COMMAND, {"task_id": task_id}, **to)  # noqa: SLF001


def replaced_by(key: str, task_id: str) -> str:
    """Return why a task ends that a newer one replaces."""
    return f"a newer message of key {key!r} replaces it: task {plain(task_id)}"


def why_replaced(request: Any) -> str:
    """
    Return why a task whose process was killed has ended: a newer one waits; empty: none does.

    Called before the task's lease is released, as the lease has the mark of the newer task.  Blocks
    for a round trip per key if the task can be cancelled.
    """
    guard = request.task.dislock_guard
    if guard.options.on_cancel is None or guard.runtime.off:
        return ""
    start = execution_start(request.id, request.hostname, request.worker_pid)
    try:
        names = guard.runtime.lock_names(guard.keys_of(request))
        server = guard.runtime.process.store.lock_server
        states = [read_state(server, name) for name in names]
    except Exception as exc:  # noqa: BLE001 -- also any error of a user's callable
        #: WARNING: Its process died, and the lock server is away; it ends as a task whose process
        #: was killed. -> Check the lock server.
        logger.warning(
            "Whether task %s[%s] was cancelled is not known: %s",
            *(request.task.name, request.id, reason_of(exc)),
        )
        return ""
    for state in states:
        for holder in state.holders:
            if holder.owner.startswith(start) and holder.superseded:
                return replaced_by(state.key, holder.superseded)
    return ""


def end_cancelled(request: Any, reason: str) -> NoReturn:
    """
    End a task whose process was killed for a newer one: store REVOKED; raises TaskSkipped.

    Blocks for BACKEND_WITHIN at most: the worker's event loop waits.
    """
    end = request.task, Context(request.request_dict), TaskRevokedError(reason), states.REVOKED
    try:
        store_end(*end, within=BACKEND_WITHIN)
    except TimeoutError as exc:
        #: WARNING: The result backend does not answer. -> Repair it.
        logger.warning(
            "Task %s[%s] was cancelled, which its result does not say yet: %s",
            *(request.task.name, request.id, exc),
        )
    raise TaskSkipped(reason)


def was_cancelled(lease: Lease | None, error: BaseException) -> bool:
    """
    Tell whether a body has ended with this error because it was cancelled.

    A retry in a body that was told of a newer task counts as well: it must not come back.
    """
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
