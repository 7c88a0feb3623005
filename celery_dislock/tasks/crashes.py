"""Let a task fail that kills its process each time, instead of delivering it again for ever.

With ``acks_late`` and ``reject_on_worker_lost`` Celery gives a message back to its queue when the
process of its task has died.  If the task itself kills the process (it takes too much memory, or
crashes in C code), this goes on for ever.  With ``lock_crash_limit`` the worker's main process
counts these deaths when Celery is about to give the message back.  So a task whose message does not
come back is not counted: one that was revoked or ended by its time limit, or whose result is stored
already.

The count is kept on the lock server, as each delivery may come to another worker.  As with a
ticket, there is one count for one piece of work: a retry that the task asks for has a new count.
"""

from __future__ import annotations

import logging
from typing import Any
from uuid import uuid4

from celery import worker
from celery.app.task import Context

from celery_dislock import scripts
from celery_dislock.exceptions import TaskCrashedError
from celery_dislock.keys.names import shown_id, ticket_of_request
from celery_dislock.redaction import reason_of
from celery_dislock.scripts import milliseconds
from celery_dislock.scripts.names import crashes_of
from celery_dislock.words import TEXT_MOST, plain

CRASHES_KEPT = 7 * 86400.0  # seconds for which a delivery's crashes are kept after the last one

logger = logging.getLogger("celery_dislock")


def is_stopping() -> bool:
    """Tell whether this worker shuts down, so that its pool processes are ended from outside."""
    flags = worker.state.should_stop, worker.state.should_terminate
    return any(flag is not None and flag is not False for flag in flags)  # 0 is an exit status


def count_crash(request: Any, cause: BaseException) -> None:
    """
    Count that the process of a request has died, if its task has a limit; blocks for a round trip.

    Args:
        request: The worker's request, whose message is about to be given back.
        cause: What its process died of.

    Raises:
        TaskCrashedError: The limit is reached: the message must not be given back.
    """
    task, guard = request.task, request.task.dislock_guard
    limit = guard.options.lock_crash_limit
    if limit is None or guard.runtime.off:
        return
    try:
        keys, ticket = guard.keys_of(request), ticket_of_request(Context(request.request_dict))
        key = crashes_of(guard.runtime.lock_names(keys)[0], ticket)
        server = guard.runtime.process.store.lock_server
        times = server.run(scripts.CRASH, [key], uuid4().hex, milliseconds(CRASHES_KEPT))
    except Exception as exc:  # noqa: BLE001 -- also any error of a user's callable
        #: WARNING: The lock server is away; the task may run once more than `lock_crash_limit`
        #: says. -> Check the lock server.
        logger.warning(
            "Task %s[%s] has killed its process, which is not counted; it is delivered again: %s",
            *(task.name, request.id, reason_of(exc)),
        )
        return
    if times < limit:
        return
    task_id, reason = shown_id(request.id), plain(repr(cause))[:TEXT_MOST]
    #: ERROR: A task that kills its process each time; Celery's traceback with TaskCrashedError
    #: follows. -> Find out what kills it, then send it again.
    logger.error(
        "Task %s[%s] (key %s) fails and is not delivered again: its process has died as often as "
        "lock_crash_limit=%d admits, the last time: %s. Find out what kills it, mostly too much "
        "memory or a crash in C code, before you send it again.",
        *(task.name, task_id, ", ".join(map(repr, keys)), limit, reason),
    )
    raise TaskCrashedError(task.name, task_id, times, limit, reason) from cause
