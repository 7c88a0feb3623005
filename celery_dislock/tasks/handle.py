"""The lock of a key as a caller sees it from outside: who holds it, who waits, and freeing it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_dislock.config.censoring import checked
from celery_dislock.config.values import seconds as _seconds
from celery_dislock.servers.overview import PLACES_SHOWN, look_at_all
from celery_dislock.servers.view import Holder
from celery_dislock.tasks.actions import FREED, STILL_RUNS, TERMINATED, WAIT, Actions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import timedelta

    from celery import Celery

    from celery_dislock.locks.runtime import Runtime
    from celery_dislock.parking.process import ParkingProcess
    from celery_dislock.servers.view import LockState, ReservationState
    from celery_dislock.servers.waiters import Waiter

HELD_BACK = _seconds(at_least=0)  # check of a time


class LockHandle:
    """
    The lock of a key, or the locks of several keys, seen from outside.

    Holds nothing and keeps no connection of its own: each method asks the lock server, one round
    trip per key.  With several keys it stands for all of them.  Iterate over it to get a handle for
    each key.

    Args:
        keys: The keys, in the order in which they are taken.
        runtime: What the app's locks share.
        app: The app whose workers can be told to end a task; None: there is none.

    Attributes:
        keys: The keys.
    """

    def __init__(
        self, keys: Sequence[str], runtime: Runtime[ParkingProcess], app: Celery | None
    ) -> None:
        self.keys = tuple(keys)
        self._names = runtime.lock_names(self.keys)
        self._runtime = runtime
        self._app = app

    @property
    def key(self) -> str:
        """The key, or all keys in one text, for messages."""
        return " + ".join(self.keys)

    def __iter__(self) -> Iterator[LockHandle]:
        for key in self.keys:
            yield LockHandle([key], self._runtime, self._app)

    def __len__(self) -> int:
        return len(self.keys)

    def state(self, most: int = PLACES_SHOWN) -> list[LockState]:
        """
        Return all that the lock server knows, for each key.

        If several keys are reserved together for a message, one more state follows, which has the
        reservation.

        Args:
            most: Maximum number of places in line for each key.

        Raises:
            DamagedLockError: A record of a lock cannot be read.
            StoreError: The lock server did not answer.
        """
        return look_at_all(self._runtime.process.store.lock_server, self._names, most)

    def holders(self) -> list[Holder]:
        """
        Return the live leases; of several keys, those of each in turn.

        Raises:
            DamagedLockError, StoreError: As for :meth:`state`.
        """
        return [holder for lock in self.state(0) for holder in lock.holders]

    def line(self, most: int = PLACES_SHOWN) -> list[Waiter]:
        """
        Return the waiters and parked tasks in line; of several keys, the line of each in turn.

        Args:
            most: Maximum number of places for each key.

        Raises:
            DamagedLockError, StoreError: As for :meth:`state`.
        """
        return [place for lock in self.state(most) for place in lock.line]

    def free(
        self,
        shown: Holder | ReservationState | None = None,
        *,
        terminate: bool = False,
        wait: float = WAIT,
    ) -> list[Holder | ReservationState]:
        """
        End leases and reservations, and hand the lock to the next in line.

        The body of a holder still runs, and may run beside the next one, until its next renewal
        tells it that the lease is lost.  With *terminate* its process is ended first.  If the key
        was reserved for a message, the next message of the key is sent.  The message that it was
        reserved for may still wait, and its task then runs as well.

        Args:
            shown: A lease of :meth:`holders`, or the reservation of a :meth:`state`, which is ended
                if it is still the same.  None: all that are there now.
            terminate: Tell the workers to end the tasks that hold the lock, and wait until each has
                released it.  Works with a prefork pool.  The lease of a body that may still run
                after *wait* seconds is not ended, and neither is a reservation then.
            wait: Maximum seconds to wait for each lease.

        Returns:
            The leases and reservations that were ended here, and the leases that a terminated
            process has released.  Those that had ended before are missing.

        Raises:
            DamagedLockError, StoreError: As for :meth:`state`.
            BrokerError: The broker did not take the command for the workers.
            SettingsError: *terminate* without an app, as with ``Dislock.from_url()``.
        """
        actions = Actions(self._app, self._runtime.process)
        ended: list[Holder | ReservationState] = []
        locks, still_runs = self.state(0), False
        for lock in locks:
            for holder in lock.holders:
                if shown and _identity(shown) != _identity(holder):
                    continue
                if terminate:
                    outcome = actions.terminate_and_free(lock.name, holder, wait=wait)
                    still_runs = still_runs or outcome == STILL_RUNS
                    is_ended = outcome in {FREED, TERMINATED}
                else:
                    is_ended = actions.free(lock.name, holder.owner, holder.token)
                if is_ended:
                    ended.append(holder)
        for lock in [] if still_runs else locks:
            reserved = lock.reservation
            if reserved is None or (shown and _identity(shown) != _identity(reserved)):
                continue
            if actions.end_reservation(lock.name, reserved):
                ended.append(reserved)
        return ended

    def hold_back(self, seconds: float | timedelta, *, note: str = "") -> None:
        """
        Let nobody in the whole fleet take the lock for some time, as after an answer 429.

        Holders keep the lock.  A task that comes meanwhile comes too early, as with a rate: see
        ``lock_on_conflict``.

        Args:
            seconds: For how long, >= 0, from now; replaces the time of an earlier call.  0: the
                lock may be taken again, unless an operator has paused it.
            note: Why: shown to people, and to tasks that come too early.

        Raises:
            SettingsError: *seconds* is negative or no number; or there are several lock servers.
            StoreError: The lock server did not answer.  The lock may be held back.
        """
        lasts = checked("hold_back()", "seconds", HELD_BACK, seconds)
        actions = Actions(self._app, self._runtime.process)
        for name in self._names:
            actions.hold_back(name, lasts, note=note)

    def __repr__(self) -> str:
        return f"<LockHandle {self.key!r}>"


def _identity(shown: Holder | ReservationState) -> tuple[object, ...]:
    """Return what tells a lease, or a reservation, from all others."""
    if isinstance(shown, Holder):
        return shown.owner, shown.token
    return shown.id, shown.mark, shown.number
