"""A lock from outside, in Python: who holds it, who waits, and freeing it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_dislock.operating.actions import Actions
from celery_dislock.operating.overview import PLACES, Overview

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from celery import Celery

    from celery_dislock.locks.runtime import Runtime
    from celery_dislock.operating.overview import Holder, LockState, Place
    from celery_dislock.parking.process import ParkingProcess

WAIT = 30.0  # seconds for a terminated task to end


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

    def state(self, most: int = PLACES) -> list[LockState]:
        """
        Return all that the lock server knows, for each key.

        Args:
            most: Maximum number of places in line for each key.

        Raises:
            DamagedLockError: A record of a lock cannot be read.
            StoreError: The lock server did not answer.
        """
        overview = Overview(
            self._runtime.process.store.lock_server, self._runtime.settings.dislock_prefix
        )
        return [overview.lock(name, most=most) for name in self._names]

    def holders(self) -> list[Holder]:
        """
        Return the live leases; of several keys, those of each in turn.

        Raises:
            DamagedLockError, StoreError: As for :meth:`state`.
        """
        return [holder for lock in self.state(0) for holder in lock.holders]

    def line(self, most: int = PLACES) -> list[Place]:
        """
        Return those who wait; of several keys, the line of each in turn.

        Args:
            most: Maximum number of places for each key.

        Raises:
            DamagedLockError, StoreError: As for :meth:`state`.
        """
        return [place for lock in self.state(most) for place in lock.line]

    def free(
        self, holder: Holder | None = None, *, terminate: bool = False, wait: float = WAIT
    ) -> list[Holder]:
        """
        End leases, and hand the lock to the next in line.

        The body of a holder still runs, and may run beside the next one, until its next renewal
        tells it that the lease is lost.  With *terminate* its process is ended first.

        Args:
            holder: A lease of :meth:`holders`, which is ended if it is still the same.  None: all
                leases that are there now.
            terminate: Tell the workers to end the tasks that hold the lock, and wait until each has
                released it.  Works with a prefork pool.  A lease that is still there after *wait*
                seconds is not ended, unless it is not renewed any more.
            wait: Maximum seconds to wait for each lease.

        Returns:
            The leases that were ended here, or by the process that was terminated.  A lease that
            had ended before is missing.

        Raises:
            DamagedLockError, StoreError: As for :meth:`state`.
            BrokerError: The broker did not take the command for the workers.
            SettingsError: *terminate* without an app, as with ``Dislock.from_url()``.
        """
        actions = Actions(self._app, self._runtime.process)
        ended = []
        for lock in self.state(0):
            for found in lock.holders:
                same = holder is None or (holder.owner, holder.token) == (found.owner, found.token)
                if not same:
                    continue
                if terminate and found.can_be_terminated:
                    actions.terminate(found)
                    left = actions.wait_until_ended(lock.name, found, wait)
                    if left is None:
                        ended.append(found)
                        continue
                    if left.may_live:
                        continue
                if actions.free(lock.name, found.owner, found.token):
                    ended.append(found)
        return ended

    def __repr__(self) -> str:
        return f"<LockHandle {self.key!r}>"
