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
from typing import TYPE_CHECKING

from celery.states import SUCCESS

from celery_dislock.exceptions import StoreError
from celery_dislock.keys.names import shown_id
from celery_dislock.messages.unrun import acknowledge, put_off

if TYPE_CHECKING:
    from celery_dislock.messages.delivery import Delivery
    from celery_dislock.servers.store import Store

ENDED = "ended"
DONE = "done"

logger = logging.getLogger("celery_dislock")


class Copies:
    """
    Finds other deliveries of the same task, and leaves marks for them.

    Args:
        delivery: The delivery.
        store: The store of its lock.
    """

    def __init__(self, delivery: Delivery, store: Store) -> None:
        self._delivery = delivery
        self._lock = delivery.lock
        self._store = store
        self._ended = False
        delivery.after_result.append(self.result_stored)

    def look_for_others(self) -> None:
        """
        Release the lock and end this delivery, if another delivery runs or has succeeded.

        Raises:
            Ignore: This delivery is a copy; it was put off, or is acknowledged without running.
            StoreError: The lock server did not answer.
        """
        options, owner = self._lock.options, self._delivery.attempt.owner
        if options.lock_mode == "shared" or options.admits_several:
            for other in self._store.holders(self._lock.names[0]):
                # One that is left to expire has no body: else two that were put off, and leave
                # their leases for lock_at_least_for, would put each other off for ever.
                is_copy = other.id == shown_id(self._delivery.id) and other.owner != owner
                if is_copy and not other.expiring:
                    self._put_off("another delivery of this task holds", other.remaining)
        if not options.lock_dedupe_redelivered:
            return
        mark = self._store.recall(self._lock.names[0], self._delivery.id)
        state, _, retries = (mark or "").partition(" ")
        if not retries.isdecimal() or int(retries) < self._delivery.request.retries:
            return  # no mark, or one of an earlier retry
        if state == ENDED:
            self._put_off("this task has just succeeded under", self._lock.timeout)
        if state == DONE:
            self._delivery.end_reservation()
            acknowledge(self._delivery, f"it has succeeded under lock {self._lock.key!r} before")

    def _put_off(self, why: str, at_most: float) -> None:
        self._delivery.settle()  # before its message comes again
        reason = f"{why} lock {self._lock.key!r}"
        put_off(self._delivery, reason, at_most=at_most, level=logging.WARNING)

    def body_succeeded(self) -> None:
        """Set the mark *ended* before the lock is released, if the task's options ask for marks."""
        if self._lock.options.lock_dedupe_redelivered:
            self._ended = self._mark(ENDED, self._lock.timeout)

    def result_stored(self, state: str) -> None:
        """Set the mark *done* after the result is stored and the callbacks are sent."""
        if self._ended and state == SUCCESS:
            self._mark(DONE, self._lock.options.lock_dedupe_for)

    def _mark(self, state: str, seconds: float) -> bool:
        mark = f"{state} {self._delivery.request.retries}"
        try:
            self._store.remember(self._lock.names[0], self._delivery.id, mark, seconds)
        except StoreError as exc:
            logger.warning(
                "Task %s has succeeded, but a copy of it may run again: %s", self._delivery, exc
            )
            return False
        return True
