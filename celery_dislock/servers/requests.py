"""What is asked of a lock server, as values.

Nothing here sends or waits; :mod:`celery_dislock.servers.store` does, and writes the arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from celery_dislock.servers.reservations import Reservation


class Ending(NamedTuple):
    """
    How an owner's leases end, and whether its task's ticket and reservation end with them.

    The guard makes the ending, and the lease passes it on to the script.

    Attributes:
        expires: Whether the leases are left to expire instead of being released.  The lease then
            sets *at_least* to the time of their expiry.
        at_least: Seconds since the acquisition.  A lease that is younger is left to expire at that
            age.  0: end it now.
        ticket: Ticket of a task that has ended, and may have been parked; empty: none.
        settles: Seconds in which the task's result may still be on its way.  A copy that comes
            later may run.  0: the task is done, and no copy may run.  DEAD_LETTERED: its message is
            rejected, and runs if the broker brings it back.  None: its process has died, and its
            message may come again.
        reservation: A reservation beside the one lock, which ends with it; None: none.
    """

    expires: bool = False
    at_least: float = 0.0
    ticket: str = ""
    settles: float | None = 0.0
    reservation: Reservation | None = None


RELEASED = Ending()
DEAD_LETTERED = -1.0


class LateRelease(NamedTuple):
    """
    A release that is sent later.

    Attributes:
        locks: Names of the locks in Redis.
        owner: Owner of the leases, or of the places in line.
        ending: How they end.
    """

    locks: Sequence[str]
    owner: str
    ending: Ending = RELEASED


class Execution(NamedTuple):
    """
    An execution that may not renew its leases itself, although its process is alive.

    Attributes:
        locks: Names of the locks in Redis.
        owner_start: Start of the owner's name: all but the counter of the acquisition.
        ttl: Expiry of the leases in seconds, counted from their renewal.
        overdue: Seconds without a renewal after which a lease is renewed.
        longest: Seconds after the acquisition from which a lease is not renewed; 0: no limit.
    """

    locks: Sequence[str]
    owner_start: str
    ttl: float
    overdue: float
    longest: float
