"""Put a task off: send it again for a later time, under its own id.

The message's headers contain notes; see :mod:`celery_dislock.messages.headers`.
"""

from __future__ import annotations

import logging
import random
import time
from typing import TYPE_CHECKING, Any

from celery.exceptions import Reject
from kombu.exceptions import OperationalError

from celery_dislock.messages.headers import PUT_OFF_MOST_TIMES, READERS
from celery_dislock.redaction import reason_of

if TYPE_CHECKING:
    from celery import Task
    from celery.app.task import Context

    from celery_dislock.messages.delivery import Delivery

PUT_OFF_FIRST = 1.0  # seconds; doubled each time
PUT_OFF_MOST = 60.0  # seconds

logger = logging.getLogger("celery_dislock")


def put_off(delivery: Delivery, reason: str, *, at_most: float = PUT_OFF_MOST) -> float:
    """
    Send the task again for a later time, without counting towards its own retries.

    The caller ends this delivery and logs that the task was put off.

    If the broker is away, a task that was acknowledged early exists only in this process.  Then the
    call blocks, in the worker slot, until the message is sent.

    Args:
        delivery: The delivery.
        reason: Why the task is put off; logged if the broker is away.
        at_most: Maximum delay in seconds, before jitter; at least 1 s is used.

    Returns:
        Seconds from now until the task is due.

    Raises:
        Reject: The broker is away.  It has the message still and will deliver it again.
    """
    task, request, notes = delivery.task, delivery.request, delivery.notes
    backoff = PUT_OFF_FIRST * 2.0 ** min(notes.put_off, 10)
    jitter = random.uniform(0.75, 1.25)  # noqa: S311 -- not a secret
    countdown = max(min(backoff, at_most, PUT_OFF_MOST), PUT_OFF_FIRST) * jitter
    notes.put_off = min(notes.put_off + 1, PUT_OFF_MOST_TIMES)
    given = request.as_execution_options()["headers"] or {}
    headers = {name: value for name, value in given.items() if name not in READERS}
    headers.update(notes.to_headers())
    # Celery before 5.7 drops this option.
    kept = {name: value for name, value in vars(request).items() if name == "ignore_result"}
    signature = task.signature_from_request(
        request, headers=headers, countdown=countdown, retries=request.retries, **kept
    )
    pause = PUT_OFF_FIRST
    while True:
        try:
            signature.apply_async()
            break
        except OperationalError as exc:
            if task.acks_late:  # the broker still has the message
                rejected = Reject(reason_of(exc), requeue=True)
                why = f"its broker, which is away: {reason_of(exc)}; {reason}"
                what = f"will be delivered again by {why}"
                raise delivery.told(rejected, what, level=logging.WARNING) from None
            logger.error(  # noqa: TRY400 -- repeated, and the reason is enough
                "Task %s cannot be put off, and waits in its slot: the broker is away: %s; %s",
                *(delivery, reason_of(exc), reason),
            )
        time.sleep(pause)
        pause = min(pause * 2, PUT_OFF_MOST)
    return countdown


def result_is_ignored(task: Task, request: Context) -> bool:
    """Tell whether the result of a delivery is not stored."""
    ignores: Any = vars(request).get("ignore_result")  # not Context's class attribute False
    return bool(task.ignore_result if ignores is None else ignores)
