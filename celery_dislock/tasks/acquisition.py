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
from celery_dislock.messages.headers import OWNERS_MOST
from celery_dislock.messages.unrun import put_off
from celery_dislock.parking.park import Parking
from celery_dislock.servers.replies import Replaced

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery_dislock.locks.lease import Conflict
    from celery_dislock.locks.runtime import Runtime
    from celery_dislock.messages.delivery import Delivery
    from celery_dislock.parking.answers import Full
    from celery_dislock.parking.process import ParkingProcess
    from celery_dislock.parking.store import Bounds

DAMAGED_TRIES = 5  # times put off, about 30 s in all, before a task fails for a damaged lock

T = TypeVar("T")

logger = logging.getLogger("celery_dislock")


class Acquisition:
    """
    Acquires the lock for one delivery.

    Every public method blocks.  If the lock server is away, ``dislock_on_unavailable`` decides
    whether the delivery ends, or the method returns None and the body runs without its lock.

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
        self._first: Callable[[], Lease | Conflict] = partial(
            delivery.lock.try_acquire, delivery.attempt
        )
        was_parked = delivery.notes.parked is not None
        if was_parked and not delivery.options.parks:  # it had been promised a turn
            strategy = "queue" if len(delivery.lock.names) == 1 else "retry"
            delivery.options = replace(delivery.options, lock_on_conflict=strategy)
        can_park = self._process.can_park and not delivery.is_eager
        if can_park and (was_parked or delivery.options.parks) and len(delivery.lock.names) == 1:
            self.parking = Parking(delivery, self._process)
            self._first = self.parking.ask

    def ask(self) -> Lease | Conflict | None:
        """Take the lock if it is free, or claim a parked task's turn; one round trip."""
        return self._asked(self._first, first=True)

    def wait(self, seconds: float) -> Lease | Conflict | None:
        """
        Wait in line for the lock for *seconds* at most; occupies the worker slot.

        Returns a conflict at once if the lock is reserved for a parked task, which may need that
        slot.  The task keeps its place in line then.
        """
        delivery = self.delivery
        return self._asked(
            partial(delivery.lock.acquire, delivery.attempt, timeout=seconds, gives_way=True)
        )

    def park(
        self, parking: Parking, conflict: Conflict, bounds: Bounds
    ) -> Lease | Conflict | Full | None:
        """
        Park the task; see :meth:`Parking.park`.

        A task that may be in line already never runs without its lock: it is put off instead.
        """
        return self._asked(partial(parking.park, conflict, bounds), may_run=False)

    def unavailable(self, error: StoreError, owner: str | None, *, may_run: bool = True) -> None:
        """
        Apply ``dislock_on_unavailable`` after the lock server did not answer.

        Returns only if the body runs without its lock.

        Args:
            error: The error of the lock server.
            owner: Owner for which the lock was requested; None if it was not requested.  The
                server may still grant the lock to this owner.  If the task is put off, its next
                delivery releases that lease first.
            may_run: Whether the body may run without its lock; if not, "run" puts the task off.

        Raises:
            Retry: The task was put off.
            Reject: The broker is away too, and will deliver the message again.
            StoreError: The task fails.  An eager task always fails, because it cannot be put off.
                A task whose lock is damaged fails after some tries.
        """
        delivery, key = self.delivery, self.delivery.lock.key
        self._process.lock_server_failed(error)
        choice = self._runtime.settings.dislock_on_unavailable
        attempt = delivery.attempt
        delivery.lock.channel.unavailable(attempt, key, choice, str(error))
        if delivery.notes.since is None:
            delivery.notes.since = time.time()
        if choice == "run" and may_run:
            logger.warning("Task %s runs without its lock %r: %s", delivery, key, error)
            return
        if owner is not None and not isinstance(error, UnreachableError):
            delivery.lock.release_late(owner)  # or a stalled process may keep what it was granted
        notes = delivery.notes
        damaged = isinstance(error, DamagedLockError) and notes.put_off >= DAMAGED_TRIES
        if choice == "raise" or damaged or delivery.is_eager:
            raise error
        if owner is not None:
            notes.given_up = [*notes.given_up, owner][-OWNERS_MOST:]
        put_off(delivery, f"lock {key!r} cannot be had: {error}", error=error)

    def _asked(
        self, ask: Callable[[], T], *, first: bool = False, may_run: bool = True
    ) -> T | None:
        """Call *ask*; if the server does not answer, apply ``dislock_on_unavailable``."""
        attempt, owner = self.delivery.attempt, None
        try:
            if first:
                self._end_given_up()
            owner = attempt.owner
            if first:
                self._take_over()
            answer = ask()
        except StoreError as exc:
            self.unavailable(exc, owner, may_run=may_run)
            return None
        except (Ignore, Replaced):  # parked, or a copy: the server has answered
            self._process.lock_server_answered(took=False)
            raise
        except BaseException:  # of a signal handler, perhaps with the lock granted already
            self.delivery.lock.interrupted(attempt)
            self.delivery.settle()
            raise
        took = isinstance(answer, Lease) and attempt.how in {AT_ONCE, PUT_OFF}
        self._process.lock_server_answered(took=took)
        return answer

    def _end_given_up(self) -> None:
        """Release leases that earlier deliveries may have been granted after they gave up."""
        for owner in self.delivery.notes.given_up:
            self.delivery.lock.store.release(self.delivery.lock.names, owner)

    def _take_over(self) -> None:
        """Take over the lease that an earlier delivery has left for this one."""
        left_by, lock, attempt = (
            self.delivery.notes.held_by,
            self.delivery.lock,
            self.delivery.attempt,
        )
        if left_by is None:
            return
        taken = lock.store.take_over(lock.names, left_by, attempt.owner, attempt.holder_json)
        if 0 < taken < len(lock.names):  # the leases are kept all together, or not at all
            lock.abandon(attempt)
