"""Copies of a task: messages that are delivered again, for any reason.

A copy never runs beside the execution that it repeats.  It is not dropped either, because it may be
the only message left of that work.  An exclusive lock keeps a copy from running by itself.  If a
lock admits several leases, a copy looks for the task among the holders.

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
from typing import TYPE_CHECKING

from celery.states import SUCCESS

from celery_dislock.exceptions import StoreError
from celery_dislock.keys.names import shown_id
from celery_dislock.messages.unrun import acknowledge, put_off

if TYPE_CHECKING:
    from celery_dislock.locks.lease import Lease
    from celery_dislock.messages.delivery import Delivery
    from celery_dislock.servers.store import Store

ENDED = "ended"
DONE = "done"

logger = logging.getLogger("celery_dislock")


def look_for_others(delivery: Delivery, lease: Lease, store: Store) -> Lease:
    """
    Return the lease, unless another delivery of the task runs or has succeeded.

    Args:
        delivery: The delivery, which has its lock.
        lease: Its lease, which is released if it is a copy.
        store: The store of its lock.

    Raises:
        Ignore: This delivery is a copy; it was put off, or is acknowledged without running.
        StoreError: The lock server did not answer.
    """
    lock, options, owner = delivery.lock, delivery.lock.options, delivery.attempt.owner
    if options.lock_mode == "shared" or options.admits_several:
        for other in store.holders(lock.names[0]):
            # One that is left to expire has no body: else two that were put off, and leave
            # their leases for lock_at_least_for, would put each other off for ever.
            is_copy = other.id == shown_id(delivery.id) and other.owner != owner
            if is_copy and not other.expiring:
                _put_off(delivery, "another delivery of this task holds", other.remaining)
    if not options.lock_dedupe_redelivered:
        return lease
    mark = store.recall(lock.names[0], delivery.id)
    state, _, retries = (mark or "").partition(" ")
    if not retries.isdecimal() or int(retries) < delivery.request.retries:
        return lease  # no mark, or one of an earlier retry
    if state == ENDED:
        _put_off(delivery, "this task has just succeeded under", lock.timeout)
    if state == DONE:
        delivery.end_reservation()
        acknowledge(delivery, f"it has succeeded under lock {lock.key!r} before")
    return lease


def _put_off(delivery: Delivery, why: str, at_most: float) -> None:
    delivery.settle()  # before its message comes again
    reason = f"{why} lock {delivery.lock.key!r}"
    put_off(delivery, reason, at_most=at_most, level=logging.WARNING)


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
        logger.warning("Task %s has succeeded, but a copy of it may run again: %s", delivery, exc)
        return False
    return True
