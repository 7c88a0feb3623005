"""Acquire the lock for one delivery, and handle a lock server that does not answer."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from celery.exceptions import Ignore

from celery_dislock.exceptions import DamagedLockError, StoreError, UnreachableError
from celery_dislock.locks.lease import AT_ONCE, PUT_OFF, Lease
from celery_dislock.messages.headers import OWNERS_MOST, is_under
from celery_dislock.messages.unrun import put_off, skip
from celery_dislock.parking.park import Parking, put_off_later
from celery_dislock.servers.records import Conflict
from celery_dislock.servers.replies import Replaced
from celery_dislock.tasks.redelivery import look_for_mark

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery_dislock.locks.runtime import Runtime
    from celery_dislock.messages.delivery import Delivery
    from celery_dislock.parking.process import ParkingProcess

DAMAGED_TRIES = 5  # times put off, about 30 s in all, before a task fails for a damaged lock

T = TypeVar("T")

logger = logging.getLogger("celery_dislock")


class Acquisition:
    """
    Acquires the lock for one delivery.

    Every method blocks.  If the lock server is away, ``dislock_on_unavailable`` decides whether the
    delivery ends, or the method returns None and the body runs without its lock.

    Args:
        delivery: The delivery.
        runtime: The locks of its app.

    Attributes:
        delivery: The delivery.
        parking: Parks the delivery, or claims its turn; None if the delivery cannot be parked.
    """

    def __init__(self, delivery: Delivery, runtime: Runtime[ParkingProcess]) -> None:
        self.delivery = delivery
        self.parking: Parking | None = None
        self._runtime = runtime
        self._process = runtime.process
        was_parked = delivery.notes.parked is not None
        parks, has_line = delivery.options.parks, self._process.lines.can_queue(delivery.lock.names)
        if was_parked and not parks:  # it was parked before its code changed, and must get its turn
            strategy = "queue" if has_line else "retry"
            delivery.options = replace(delivery.options, lock_on_conflict=strategy)
        fits = has_line and not delivery.is_eager
        if (was_parked or parks) and fits and self._process.can_park:
            self.parking = Parking(delivery, self._process)

    def ask(self) -> Lease | Conflict | None:
        """
        Take the lock if it is free, or claim a parked task's turn; one round trip.

        Raises:
            Ignore: The notes of the delivery say that it ends without asking for the lock; or it
                is a copy, to which no strategy for a conflict applies.
        """
        delivery, notes = self.delivery, self.delivery.notes
        first: Callable[[], Lease | Conflict] = (
            partial(delivery.lock.try_acquire, delivery.attempt)
            if self.parking is None
            else self.parking.ask
        )
        if notes.came:
            self._end_unasked()
        if notes.unasked is not None:
            self._unavailable(notes.unasked)
            return None
        if notes.given_up or notes.held:
            first = partial(self._ask_after_release, first)
        answer = self.answer(first)
        return self.end_if_copy(answer) if isinstance(answer, Conflict) else answer

    def end_if_copy(self, answer: T) -> T | None:
        """Return an answer, unless ``lock_dedupe_redelivered`` ends the delivery as a copy."""
        delivery = self.delivery
        if answer is None or not delivery.options.lock_dedupe_redelivered or delivery.is_eager:
            return answer
        return self.answer(partial(look_for_mark, delivery, answer, self._process.store))

    def answer(self, ask: Callable[[], T], *, may_run: bool = True) -> T | None:
        """
        Return what the lock server answers; None if the body runs without its lock.

        Args:
            ask: Asks the lock server.
            may_run: Whether the body may run without its lock; if not, "run" puts the task off.

        Raises:
            Retry: The lock server is away, and the task was put off.
            Reject: The broker is away too, and will deliver the message again.
            StoreError: The task fails.  An eager task always fails, because it cannot be put off.
                A task whose lock is damaged fails after some tries.
        """
        attempt = self.delivery.attempt
        try:
            answer = ask()
        except StoreError as exc:
            self._unavailable(exc, may_run=may_run)
            return None
        except (Ignore, Replaced):  # parked, or a copy: the server has answered
            self._process.lock_server_answered(took=False)
            raise
        except BaseException:  # raised by a signal handler; the lock may be granted already
            self.delivery.lock.interrupted(attempt)
            self.delivery.settle()
            raise
        took = isinstance(answer, Lease) and attempt.how in {AT_ONCE, PUT_OFF}
        self._process.lock_server_answered(took=took)
        return answer

    def _unavailable(self, error: StoreError, *, may_run: bool = True) -> None:
        """
        Apply ``dislock_on_unavailable`` after the lock server did not answer.

        Returns only if the body runs without its lock.  If the lock was asked for, the server may
        still grant it.  A task that is put off releases that lease at its next delivery.
        """
        delivery, key = self.delivery, self.delivery.lock.key
        delivery.settle()  # releases the lock if that was granted before the server went away
        self._process.lock_server_failed(error)
        choice = self._runtime.settings.dislock_on_unavailable
        attempt = delivery.attempt
        delivery.lock.channel.unavailable(attempt, key, choice, str(error))
        if delivery.notes.since is None:
            delivery.notes.since = time.time()
        if choice == "run" and may_run:
            #: WARNING: The lock server is away, with `dislock_on_unavailable="run"`. -> See
            #: afterwards whether two runs did harm.
            logger.warning("Task %s runs without its lock %r: %s", delivery, key, error)
            return
        has_asked = attempt.asked_at is not None
        if has_asked and not isinstance(error, UnreachableError):
            # Otherwise a process that stalls would keep a lease that it was granted.
            delivery.lock.release_late(attempt.owner)
        notes = delivery.notes
        damaged = isinstance(error, DamagedLockError) and notes.put_off >= DAMAGED_TRIES
        if choice == "raise" or damaged or delivery.is_eager:
            raise error
        if has_asked:
            notes.given_up = [*notes.given_up, attempt.owner][-OWNERS_MOST:]
        #: INFO `Task … put off for … s: lock … cannot be had: lock server …`: The lock server is
        #: away; the task comes again. -> Check the lock server.
        put_off(delivery, f"lock {key!r} cannot be had: {error}", error=error)

    def _end_unasked(self) -> None:
        """
        End a delivery whose notes say that its task does not run here; raises Ignore then.

        The turn may be of a lock under another prefix: if the task ran here, that lock's line would
        give it another turn.  Or a later release may have written the turn, or the lease that the
        delivery would take over.
        """
        delivery, notes = self.delivery, self.delivery.notes
        if notes.replaced is not None:
            skip(delivery, notes.replaced)
        if notes.is_later and (notes.parked or notes.held):
            put_off_later(delivery, self._process.lines)
        prefix = self._runtime.settings.dislock_prefix
        if notes.parked is not None and not is_under(prefix, notes.parked[0]):
            lock, _ = notes.parked
            #: WARNING `Task … put off for … s: it has its turn for …, and this worker's locks
            #: have the prefix …`: `dislock_prefix` was changed while it was parked. -> Let a worker
            #: with the old prefix run until its lines are empty.
            reason = f"it has its turn for {lock}, and this worker's locks have the prefix {prefix}"
            put_off(delivery, reason, level=logging.WARNING)

    def _ask_after_release(self, ask: Callable[[], T]) -> T:
        """Release or take over the leases that earlier deliveries have left, then call *ask*.

        Leases of other locks than the task takes by now are released: its key has changed.
        """
        lock, attempt, notes = self.delivery.lock, self.delivery.attempt, self.delivery.notes
        for owner in notes.given_up:  # these may have been granted the lock after they gave up
            lock.store.release(lock.names, owner)
        owner, *held = notes.held or [""]
        if held and {*held} != {*lock.names}:
            if all(is_under(self._runtime.settings.dislock_prefix, lock) for lock in held):
                for left in (owner, f"~{owner}"):  # its places in line; what it left to run out
                    lock.store.release(held, left)
        elif held:
            attempt.asked_at = lock.clock()
            taken = lock.store.take_over(lock.names, owner, attempt.owner, attempt.holder_json)
            if 0 < taken < len(lock.names):  # the leases are kept all together, or not at all
                lock.abandon(attempt)
        return ask()
