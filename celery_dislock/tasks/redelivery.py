"""The same task twice: a message that was delivered again, for whatever reason.

A copy never runs beside the task, and is never dropped: it may be the only one of that work.  An
exclusive lock sees to the first by itself; where a lock admits several, its holders are looked at.

A task that asks for it leaves a mark in Redis when it succeeds, beside its lock: what comes later
is acknowledged unrun.  The mark is set in two steps, because a success is not over when the body
is: its callbacks, the next step of its chain and its result come after the release.

=========  ===============================================================================
mark       what a copy does that finds it
=========  ===============================================================================
ended      is put off: the body has succeeded, and what follows is on its way.  Lasts as long
           as a lease; where the process dies in between, the copy runs
done       is acknowledged
=========  ===============================================================================
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from celery.exceptions import Ignore
from celery.states import SUCCESS

from celery_dislock.exceptions import StoreError
from celery_dislock.messages.resend import put_off

if TYPE_CHECKING:
    from celery_dislock.messages.delivery import Delivery
    from celery_dislock.servers.store import Store

ENDED = "ended"
DONE = "done"

logger = logging.getLogger("celery_dislock")


class Copies:
    """
    What one delivery, which has its lock, has to do with others of its task.

    Args:
        delivery: The delivery.
        store: Where its lock is kept.
    """

    def __init__(self, delivery: Delivery, store: Store) -> None:
        self._delivery = delivery
        self._lock = delivery.lock
        self._store = store
        self._ended = False

    def look_for_others(self) -> None:
        """
        Give up the lock and end this delivery, where another runs or has succeeded.

        Raises:
            Ignore: Put off, or acknowledged unrun.
            StoreError: The lock server did not answer.
        """
        try:
            self._look()
        except BaseException:
            self._delivery.settle()
            raise

    def _look(self) -> None:
        options, owner = self._lock.options, self._delivery.attempt.owner
        if options.lock_mode == "shared" or options.lock_limit > 1:
            for other in self._store.holders(self._lock.names[0]):
                if other.holder.get("id") == self._delivery.id and other.owner != owner:
                    self._put_off("another delivery of this task holds", other.remaining)
        if not options.lock_dedupe_redelivered:
            return
        mark = self._store.recall(self._lock.names[0], self._delivery.id)
        state, _, retries = (mark or "").partition(" ")
        if not retries.isdecimal() or int(retries) < self._delivery.request.retries:
            return  # none, or of an attempt before this one
        if state == ENDED:
            self._put_off("this task has just succeeded under", self._lock.timeout)
        if state == DONE:
            self._delivery.settle()
            reason = f"it has succeeded under lock {self._lock.key!r} before"
            raise self._delivery.told(Ignore(reason), f"acknowledged unrun: {reason}.")

    def _put_off(self, why: str, at_most: float) -> None:
        self._delivery.settle()
        reason = f"{why} lock {self._lock.key!r}"
        delay = put_off(self._delivery, reason, at_most=at_most)
        what = f"put off for {delay:.1f} s: {reason}"
        raise self._delivery.told(Ignore(reason), what, level=logging.WARNING)

    def body_succeeded(self) -> None:
        """Set the first mark, where the task asks for marks; before the lock is released."""
        if self._lock.options.lock_dedupe_redelivered:
            self._ended = self._mark(ENDED, self._lock.timeout)

    def result_stored(self, state: str) -> None:
        """Set the second mark; after the result is stored and callbacks are sent."""
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
