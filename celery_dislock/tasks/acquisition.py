"""How one delivery asks for its lock, and what becomes of it while the lock server is away."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from celery.exceptions import Ignore

from celery_dislock.exceptions import DamagedLockError, StoreError
from celery_dislock.messages.headers import OWNERS_MOST, own_turn
from celery_dislock.messages.resend import put_off
from celery_dislock.parking.park import Parking, acknowledge_unrun, leave_old_line
from celery_dislock.tasks.conflicts import come_again

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery_dislock.locks.attempt import Conflict
    from celery_dislock.locks.lease import Lease
    from celery_dislock.locks.runtime import Runtime
    from celery_dislock.messages.delivery import Delivery
    from celery_dislock.parking.process import ParkingProcess
    from celery_dislock.parking.store import Bounds
    from celery_dislock.servers.replies import Full

DAMAGED_TRIES = 5  # times a task is put off before it fails for a damaged lock: half a minute

T = TypeVar("T")

logger = logging.getLogger("celery_dislock")


class Acquisition:
    """
    One delivery's questions for its lock.

    Every method blocks.  If the lock server is away, ``dislock_on_unavailable`` decides: the
    delivery ends, or the method returns None and the body runs without its lock.

    Args:
        delivery: The delivery.
        runtime: The locks of its app.

    Attributes:
        delivery: As given.
        parking: What the delivery has to do with the line for its lock; None if it has no line.
    """

    def __init__(self, delivery: Delivery, runtime: Runtime[ParkingProcess]) -> None:
        self.delivery = delivery
        self.parking: Parking | None = None
        self._runtime = runtime
        self._process = runtime.process
        self._first: Callable[[], Lease | Conflict] = partial(
            delivery.lock.try_acquire, delivery.attempt
        )
        turn, parks = None, delivery.options.parks
        if delivery.request.headers:
            turn = own_turn(delivery.request, runtime.settings.dislock_prefix)
            self._keep_what_was_parked(parks=parks, was_parked=turn is not None)
        if delivery.is_eager or not self._process.can_park:
            return
        if (parks or turn) and len(delivery.lock.names) == 1:
            self.parking = Parking(delivery, self._process)
            self._first = self.parking.ask
        elif turn:
            self._first = partial(self._ask_for_several, turn)

    def ask(self) -> Lease | Conflict | None:
        """Take the lock if it is free, or claim a parked task's turn; one round trip."""
        return self._asked(self._first, first=bool(self.delivery.request.headers))

    def wait(self, seconds: float) -> Lease | Conflict | None:
        """Wait in line for the lock, in this worker slot."""
        delivery = self.delivery
        return self._asked(partial(delivery.lock.acquire, delivery.attempt, timeout=seconds))

    def park(
        self, parking: Parking, conflict: Conflict, bounds: Bounds
    ) -> Lease | Conflict | Full | None:
        """Put the task in line without a slot; see :meth:`Parking.park`."""
        return self._asked(partial(parking.park, conflict, bounds))

    def unavailable(self, error: StoreError, owner: str | None) -> None:
        """
        Do as ``dislock_on_unavailable`` says if the lock server does not answer.

        It may still carry out what it was sent, and grant the lock to *owner*, which nobody waits
        for any more: the next delivery ends that lease before it asks for its own.  None: it was
        not asked.

        Returns:
            If the body runs without its lock.

        Raises:
            Retry: Put off, and nothing is lost.
            StoreError: The task fails; so does an eager one, which cannot be put off, and one whose
                lock is damaged, after some tries.
        """
        delivery, key = self.delivery, self.delivery.lock.key
        self._process.lock_server_failed(error)
        choice = self._runtime.settings.dislock_on_unavailable
        if choice == "run":
            logger.warning("Task %s runs without its lock %r: %s", delivery, key, error)
            return
        notes = delivery.notes
        damaged = isinstance(error, DamagedLockError) and notes.put_off >= DAMAGED_TRIES
        if choice == "raise" or damaged or delivery.is_eager:
            raise error
        if owner is not None:
            notes.given_up = [*notes.given_up, owner][-OWNERS_MOST:]
        reason = f"lock {key!r} cannot be had: {error}"
        come_again(delivery, error, put_off(delivery, reason), reason)

    def _keep_what_was_parked(self, *, parks: bool, was_parked: bool) -> None:
        """Do not drop what was parked for another strategy that its task has by now."""
        delivery, options = self.delivery, self.delivery.options
        if not was_parked and delivery.notes.retry_until is None:
            return
        if len(delivery.lock.names) > 1:  # several keys have no line: it comes again, and again
            if options.lock_on_conflict in {"skip", "raise", "reject"}:
                delivery.options = replace(options, lock_on_conflict="retry")
        elif was_parked and not parks:
            delivery.options = replace(options, lock_on_conflict="queue")

    def _ask_for_several(self, turn: tuple[str, str]) -> Lease | Conflict:
        """Ask for a task that was parked when it had one key."""
        if not leave_old_line(self._process.lines, self.delivery, turn):
            acknowledge_unrun(self.delivery)
        return self.delivery.lock.try_acquire(self.delivery.attempt)

    def _asked(self, ask: Callable[[], T], *, first: bool = False) -> T | None:
        """Ask; if the server gives no answer, do as ``dislock_on_unavailable`` says."""
        attempt, owner = self.delivery.attempt, None
        try:
            if first:
                self._end_given_up()
            owner = attempt.owner
            if first:
                self._take_over()
            answer = ask()
        except StoreError as exc:
            self.unavailable(exc, owner)
            return None
        except Ignore:  # parked, or a copy: it asked, and got nothing
            self._process.lock_server_answered()
            raise
        except BaseException:  # a signal handler's, perhaps after the server has granted the lock
            self.delivery.lock.interrupted(attempt)
            self.delivery.settle()
            raise
        self._process.lock_server_answered()
        return answer

    def _end_given_up(self) -> None:
        """End the leases that earlier deliveries were granted while nobody listened."""
        for owner in self.delivery.notes.given_up:
            self._process.store.release(self.delivery.lock.names, owner)

    def _take_over(self) -> None:
        """Go on with the lease that an earlier delivery has left to this one."""
        left_by, lock, attempt = (
            self.delivery.notes.held_by,
            self.delivery.lock,
            self.delivery.attempt,
        )
        if left_by is None:
            return
        taken = self._process.store.take_over(
            lock.names, left_by, attempt.owner, json.dumps(attempt.holder)
        )
        if 0 < taken < len(lock.names):  # all of them, or none
            lock.abandon(attempt)
