"""What a task does that cannot have its lock: every way ends in an exception of Celery's or ours.

A task is put off by sending it again under its own id, with its own retries unspent, and ending
this delivery as RETRY: a caller that waits for the result goes on waiting.
"""

from __future__ import annotations

import logging
import random
import time
from typing import TYPE_CHECKING, NoReturn

from celery import states
from celery.exceptions import Ignore, Reject, Retry, TaskRevokedError
from kombu.exceptions import OperationalError

from celery_dislock import signals
from celery_dislock.leases import in_words

if TYPE_CHECKING:
    from celery import Task
    from celery.app.task import Context

    from celery_dislock.exceptions import StoreError
    from celery_dislock.leases import Conflict
    from celery_dislock.settings import TaskOptions

PUT_OFF_FIRST = 1.0  # seconds; doubled each time
PUT_OFF_MOST = 60.0  # seconds
PUT_OFF_HEADER = "dislock_put_off"  # times this task was put off in a row

logger = logging.getLogger("celery_dislock")


def resolve(task: Task, request: Context, conflict: Conflict, options: TaskOptions) -> NoReturn:
    """
    End a delivery whose lock is held, as ``lock_on_conflict`` says.

    A delivery of the very task that holds the lock is never dropped, whatever that says: after a
    dead worker or a lost connection it may be the only copy of that work.  It is put off.

    Raises:
        Ignore: Skipped; the result says REVOKED and why.
        LockHeldError: The task fails.
        Retry: Put off.
    """
    signals.lock_conflict.send(sender=task, conflict=conflict, task_id=request.id)
    if conflict.holder.get("id") == request.id and not request.is_eager:
        put_off(
            task,
            request,
            f"another delivery of this task holds lock {conflict.key!r}: "
            f"{in_words(conflict.holder)}",
            at_most=conflict.remaining,
        )
    error = conflict.error()
    if options.lock_on_conflict == "raise":
        raise error
    logger.info("Task %s[%s] skipped: %s.", task.name, request.id, error)
    if not request.is_eager:
        # Ignore alone would leave the caller's get() and a chord waiting for ever.
        ignores_result = (
            task.ignore_result if request.ignore_result is None else request.ignore_result
        )
        task.backend.mark_as_failure(
            request.id,
            TaskRevokedError(str(error)),
            request=request,
            store_result=not ignores_result,
            call_errbacks=False,
            state=states.REVOKED,
        )
    raise Ignore(str(error))


def unavailable(task: Task, request: Context, error: StoreError) -> NoReturn:
    """
    End a delivery whose lock could not be asked for: fail closed, and lose nothing.

    Raises:
        Retry: Put off.
        StoreError: An eager task, which has nowhere to be put.
    """
    if request.is_eager:
        raise error
    put_off(task, request, str(error))


def put_off(task: Task, request: Context, reason: str, at_most: float = PUT_OFF_MOST) -> NoReturn:
    """
    Send the task again for later, and end this delivery.

    Args:
        task: The task.
        request: Its delivery.
        reason: Why, for the log and the result.
        at_most: Seconds after which the reason is gone at the latest.

    With the broker away too, a task that was acknowledged early exists nowhere but here: it waits
    in its slot until it can be sent.

    Raises:
        Retry: It was sent.
        Reject: The broker is away, and has the message still: it is to be delivered again.
    """
    headers = dict(request.headers or {})
    times = headers.get(PUT_OFF_HEADER, 0)
    backoff = PUT_OFF_FIRST * 2 ** min(times, 10)
    jitter = random.uniform(0.75, 1.25)  # noqa: S311 -- no secret
    countdown = max(min(backoff, at_most, PUT_OFF_MOST), PUT_OFF_FIRST) * jitter
    headers[PUT_OFF_HEADER] = times + 1
    signature = task.signature_from_request(
        request, headers=headers, countdown=countdown, retries=request.retries
    )
    pause = PUT_OFF_FIRST
    while True:
        try:
            signature.apply_async()
            break
        except OperationalError as exc:
            if task.acks_late:  # the broker has the message still
                raise Reject(exc, requeue=True) from exc
            logger.error(  # noqa: TRY400 -- the reason says it all, many times over
                "Task %s[%s] cannot be put off, and waits in its slot: the broker is away: %s",
                task.name,
                request.id,
                exc,
            )
        time.sleep(pause)
        pause = min(pause * 2, PUT_OFF_MOST)
    logger.warning("Task %s[%s] put off for %.1f s: %s", task.name, request.id, countdown, reason)
    raise Retry(reason, when=countdown)
