"""End a delivery whose body does not run: put it off, skip it, or only acknowledge it.

Each function of a delivery logs what happens and why, and raises the exception that ends it.  The
message of a task that is put off is sent again for a later time, as it came, with notes in its
header; see :mod:`celery_dislock.messages.headers`.
"""

from __future__ import annotations

import logging
import random
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from celery import states
from celery.exceptions import Ignore, Reject, Retry, TaskRevokedError
from kombu.exceptions import OperationalError

from celery_dislock.config.values import LONGEST
from celery_dislock.exceptions import StoreError
from celery_dislock.messages.broker import (
    BACKEND_WITHIN,
    RefusedError,
    answer_within,
    away_or_refuses,
)
from celery_dislock.messages.headers import PUT_OFF_MOST_TIMES
from celery_dislock.messages.message import TaskSkipped, error_is_stored, store_end
from celery_dislock.messages.resending import publish
from celery_dislock.messages.routes import is_broadcast
from celery_dislock.redaction import reason_of

if TYPE_CHECKING:
    from celery import Celery
    from celery.app.task import Context

    from celery_dislock.messages.delivery import Delivery

PUT_OFF_FIRST = 1.0  # seconds; doubled each time
PUT_OFF_MOST = 60.0  # seconds
EARLY_LEAST = 0.05  # seconds until a task that comes too early comes again: clocks differ

logger = logging.getLogger("celery_dislock")


def put_off(
    delivery: Delivery,
    reason: str,
    *,
    at_most: float = PUT_OFF_MOST,
    at: float | None = None,
    error: Exception | None = None,
    level: int = logging.INFO,
) -> NoReturn:
    """
    Send the task again for a later time, without counting towards its own retries.

    If the broker is away or refuses the message, a task that was acknowledged early exists only in
    this process.  Then the call blocks, in the worker slot, until the message is sent.

    A message that was broadcast is not sent again: every worker would get another copy of it, and
    send that again, too.

    Args:
        delivery: The delivery.
        reason: Why the task is put off.
        at_most: Maximum delay in seconds, before jitter; at least 1 s is used.
        at: Seconds until the task may start, if it is only too early.  The message comes at that
            time, and a little later each time that this is repeated.
        error: The error in the result until then; None: the result is left as it is.  A StoreError
            leaves the result of a message that came before, too.
        level: Level of the log line.

    Raises:
        Retry, Ignore: The task was put off: with an *error*, and without one.
        Reject: The broker is away, or refuses the message.  It still has it, and delivers it again.
        Exception: The *error*, if the message was broadcast.
        LookupError: There is no message that could be sent again.
    """
    if is_broadcast(delivery.task.app, delivery.request.delivery_info.get("exchange") or ""):
        _end_broadcast(delivery, reason, error)
    notes, came_before = delivery.notes, delivery.came_before
    times = 2.0 ** min(notes.put_off, 10)
    jitter = random.uniform(0.75, 1.25)  # noqa: S311 -- not a secret
    if at is None:
        delay = max(min(PUT_OFF_FIRST * times, at_most, PUT_OFF_MOST), PUT_OFF_FIRST) * jitter
    else:  # with jitter, as other tasks come at this time, too
        delay = max(EARLY_LEAST, at + random.uniform(0, min(EARLY_LEAST * times, PUT_OFF_FIRST)))  # noqa: S311
    notes.put_off = min(notes.put_off + 1, PUT_OFF_MOST_TIMES)
    delay = _send_again(delivery, delay, reason)
    if delivery.reservation is not None:
        waiting = delivery.reservation.live
        if waiting is not None and not isinstance(error, StoreError):
            kept = min(delivery.options.lock_unique_for + delay, LONGEST)
            with suppress(StoreError):  # it then ends as if the task had not been put off
                delivery.lock.store.reservations.confirm(waiting._replace(ttl=kept))
        delivery.reservation.keep()
    # Of what came before, a copy may have run meanwhile, and then nobody would correct the result.
    stays = error is None or (came_before and isinstance(error, StoreError))
    ends = Ignore(reason) if stays else Retry(str(error), exc=error, when=delay)
    raise delivery.logged(ends, f"put off for {delay:.1f} s: {reason}", level=level)


def _end_broadcast(delivery: Delivery, reason: str, error: Exception | None) -> NoReturn:
    """End a copy of a message that every worker has got, and that cannot be sent to this one."""
    if error is not None:
        raise error
    if delivery.reservation is not None:
        delivery.reservation.keep()
    #: WARNING `Task … acknowledged unrun: it was broadcast, and cannot be put off: …`: Its message
    #: went to all workers under one id, and another one runs it. -> Do not broadcast a task that
    #: locks.
    what = f"acknowledged unrun: it was broadcast, and cannot be put off: {reason}"
    raise delivery.logged(Ignore(reason), what, level=logging.WARNING)


def _send_again(delivery: Delivery, delay: float, reason: str) -> float:
    """Send the message again; return the seconds until it is delivered."""
    task, message = delivery.task, delivery.message
    pause = PUT_OFF_FIRST
    while True:
        try:
            return publish(task.app, message, delivery.notes.to_header(), delay=delay)
        except (OperationalError, OSError, RefusedError) as exc:
            why = f"{away_or_refuses(exc)}; {reason}"
            if task.acks_late:  # the broker still has the message
                rejected = Reject(reason_of(exc), requeue=True)
                #: WARNING `Task … will be delivered again: the broker …`: An `acks_late` task could
                #: not be put off; the broker still has its message. -> Repair the broker.
                delivery.logged(rejected, f"will be delivered again: {why}", level=logging.WARNING)
                time.sleep(PUT_OFF_FIRST)  # or it would come, and be rejected, without a pause
                raise rejected from None
            #: ERROR: The process tries again until the broker takes it; if you kill it, the task
            #: is lost. -> Repair the broker first.
            logger.error(  # noqa: TRY400 -- repeated, and the reason is enough
                "Task %s cannot be put off, and waits in its slot: %s", delivery, why
            )
        time.sleep(pause)
        pause = min(pause * 2, PUT_OFF_MOST)


def acknowledge(delivery: Delivery, reason: str) -> NoReturn:
    """End a copy of work that is done, or is done by another message; raises Ignore."""
    raise delivery.logged(Ignore(reason), f"acknowledged unrun: {reason}.")


def skip(delivery: Delivery, reason: str) -> NoReturn:
    """End a task: store REVOKED with the reason, notify its chord and chain, and raise Ignore."""
    if not delivery.is_eager or delivery.task.store_eager_result:
        store_end(delivery.task, delivery.request, TaskRevokedError(reason), states.REVOKED)
    #: INFO `Task … cancelled: a newer message of key … replaces it: task ….`: Its body has ended
    #: because a newer task of the key has come.
    #: INFO `Task … skipped: lock … is held by …, for … so far … It does not run.`: A conflict,
    #: with `lock_on_conflict="skip"`.
    #: INFO `Task … skipped: a newer message of key … replaces it: task …. It does not run.`: A
    #: newer task has come before it began, with "cancel", or `lock_on_duplicate` is "replace" or
    #: "sooner".
    what = f"cancelled: {reason}" if delivery.began else f"skipped: {reason}. It does not run"
    raise delivery.logged(TaskSkipped(reason), f"{what}.")


def store_unrunnable(app: Celery, request: Context, error: Exception) -> bool:
    """
    Let the result of a task that nobody can run say so; tell whether it does.

    Logs an error of the result backend's client.  Blocks for BACKEND_WITHIN at most.

    Args:
        app: The app of this process.
        request: A request that was made of what is known of the message.
        error: Why nobody can run it.
    """
    name = getattr(request, "task", None)
    task = app.tasks.get(name)
    wanted = task is None or error_is_stored(task, request)
    fail = (app if task is None else task).backend.mark_as_failure
    store = partial(fail, request.id, error, request=request, store_result=wanted)
    try:
        answer_within(BACKEND_WITHIN, store)
    except Exception as exc:  # noqa: BLE001 -- any of the backend's client
        #: WARNING: Its message is damaged, and the result backend is away; the result of a parked
        #: task stays PARKED. -> Repair the backend.
        logger.warning(
            "Task %s[%s] cannot be run, and its result does not say so: %s",
            *(name, request.id, reason_of(exc)),
        )
        return False
    return True
