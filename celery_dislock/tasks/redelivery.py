"""Copies of a task: messages that are delivered again, for any reason.

A copy never runs beside the execution that it repeats.  It is not dropped either, because it may be
the only message left of that work.  An exclusive lock keeps a copy from running by itself.  If a
lock admits several leases, it refuses one more of the same task.

With ``lock_dedupe_redelivered``, a task that succeeds leaves a mark in Redis, beside its lock.  A
later copy that finds the mark is acknowledged without running.  The mark is set in two steps,
because the callbacks, the next step of the chain and the result follow after the release:

=========  ===============================================================================
mark       what happens to a copy that finds it
=========  ===============================================================================
ended      The copy is put off: the body has succeeded, and its result is not stored yet.
           The mark lasts as long as a lease.  If the process dies meanwhile, the copy runs.
done       The copy is acknowledged without running.
=========  ===============================================================================
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from celery.states import SUCCESS

from celery_dislock.exceptions import StoreError
from celery_dislock.messages.unrun import acknowledge, put_off

if TYPE_CHECKING:
    from celery_dislock.messages.delivery import Delivery
    from celery_dislock.servers.store import Store

ENDED = "ended"
DONE = "done"

T = TypeVar("T")

logger = logging.getLogger("celery_dislock")


def look_for_mark(delivery: Delivery, answer: T, store: Store) -> T:
    """
    Return an answer about the lock, unless another delivery of the task has succeeded.

    Args:
        delivery: The delivery.  If it is a copy, the lease that it may have is released.
        answer: What is returned.
        store: The store of its lock.

    Raises:
        Ignore: This delivery is a copy; it was put off, or is acknowledged without running.
        StoreError: The lock server did not answer.
    """
    lock = delivery.lock
    mark = store.recall(lock.names[0], delivery.id)
    state, _, retries = (mark or "").partition(" ")
    if not retries.isdecimal() or int(retries) < delivery.request.retries:
        return answer  # no mark, or one of an earlier retry
    if state == ENDED:
        delivery.settle()  # before its message comes again
        #: WARNING `Task … put off for … s: this task has just succeeded under lock …`: A second
        #: delivery, a moment after the first has ended.
        reason = f"this task has just succeeded under lock {lock.key!r}"
        put_off(delivery, reason, at_most=lock.timeout, level=logging.WARNING)
    if state == DONE:
        #: INFO `Task … acknowledged unrun: it has succeeded under lock … before.`: A second
        #: delivery after a success, with `lock_dedupe_redelivered`.
        acknowledge(delivery, f"it has succeeded under lock {lock.key!r} before")
    return answer


def body_succeeded(delivery: Delivery, store: Store) -> None:
    """Set the mark *ended* before the lock is released, and *done* after the result is stored."""
    if _mark(delivery, store, ENDED, delivery.lock.timeout):
        delivery.after_result.append(partial(_result_stored, delivery, store))


def _result_stored(delivery: Delivery, store: Store, state: str) -> None:
    if state == SUCCESS:
        _mark(delivery, store, DONE, delivery.lock.options.lock_dedupe_for)


def _mark(delivery: Delivery, store: Store, state: str, seconds: float) -> bool:
    mark = f"{state} {delivery.request.retries}"
    try:
        store.remember(delivery.lock.names[0], delivery.id, mark, seconds)
    except StoreError as exc:
        #: WARNING: The mark of `lock_dedupe_redelivered` could not be set. -> Check the lock
        #: server, if the task must not run twice.
        logger.warning("Task %s has succeeded, but a copy of it may run again: %s", delivery, exc)
        return False
    return True
