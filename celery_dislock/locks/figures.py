"""What a watchdog knows of its process: the leases that it renews, and how well it does.

The figures are a JSON object, because those of a pool process are read by another process.  Times
in them are monotonic, which all processes of a machine share: figures that were written a while ago
still tell how long a lock has been held.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from celery_dislock.locks.observer import FOREVER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from celery_dislock.locks.lease import Lease
    from celery_dislock.locks.loop import Loop
    from celery_dislock.locks.renewals import Counts, Renewals

SHOW_EVERY = 1.0  # seconds between two showings of the figures, at least
LISTED = 200  # leases that are listed one by one, those that are held longest first


class Showing:
    """
    The job that shows the figures of this process when they have changed.

    Args:
        loop: The loop that runs it.
        renewals: The leases, and how their renewal goes.

    Attributes:
        show: Called with the figures; it must not block for long.  None: nobody wants them.
    """

    def __init__(self, loop: Loop, renewals: Renewals) -> None:
        self.show: Callable[[Mapping[str, Any]], None] | None = None
        self._loop = loop
        self._renewals = renewals
        self._shown: object = None  # the state that the shown figures describe
        self._shown_at = 0.0

    def figures(self) -> dict[str, Any]:
        """Return the figures of this process."""
        renewals = self._renewals
        return written(os.getpid(), renewals.leases(), renewals.counts, self._loop.errors)

    def due_at(self) -> float:
        """Return when the figures are looked at next; the end of a lease does not wake the loop."""
        if self.show is None:
            return FOREVER
        now, again_at = self._loop.clock(), self._shown_at + SHOW_EVERY
        if self._shown != self._state():
            return again_at
        return max(again_at, now + SHOW_EVERY) if len(self._renewals) else FOREVER

    def run(self, now: float) -> None:
        """Show the figures now, if somebody wants them."""
        if self.show is not None:
            self._shown, self._shown_at = self._state(), now
            self.show(self.figures())

    def _state(self) -> tuple[int, ...]:
        """Return numbers that change whenever the figures do."""
        renewals = self._renewals
        return (renewals.changes, len(renewals), self._loop.errors, renewals.counts.failures)


def written(pid: int, leases: Iterable[Lease], counts: Counts, errors: int) -> dict[str, Any]:
    """
    Return the figures of a process.

    Args:
        pid: Its process id.
        leases: The leases under its watchdog.
        counts: What its watchdog has counted.
        errors: Unexpected exceptions that its watchdog has survived.
    """
    known = sorted(leases, key=lambda lease: lease.grant.since)
    return {
        "pid": pid,
        "held": len(known),
        "leases": [_of(lease) for lease in known[:LISTED]],
        "renewals": counts.renewals,
        "late": round(counts.late, 3),
        "worst_late": round(counts.worst, 3),
        "outages": counts.outages,
        "failed_renewals": counts.failures,
        "errors": errors,
    }


def _of(lease: Lease) -> dict[str, Any]:
    holder = lease.holder
    return {
        "key": lease.key,
        "task": holder.get("task"),
        "id": holder.get("id"),
        "thread": holder.get("thread"),
        "token": lease.token,
        "since": lease.grant.since,
        "renewals": lease.renewals,
        "until": lease.trusted_until,
    }


def read(figures: Mapping[str, Any], now: float) -> dict[str, Any]:
    """
    Return figures for people: with seconds in place of monotonic times.

    Args:
        figures: What :func:`written` has returned, in this process or another of this machine.
        now: Monotonic time.
    """
    leases = []
    for one in figures["leases"]:
        lease = dict(one)
        since, until = lease.pop("since"), lease.pop("until")
        lease["held_for"] = round(now - since, 3)
        lease["remaining"] = round(max(0.0, until - now), 3)
        leases.append(lease)
    return {**figures, "leases": leases}
