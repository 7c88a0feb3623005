"""What a watchdog knows of its process: the leases that it renews, and how well it does.

The figures are a JSON object, because those of a pool process are read by another process.  Times
in them are monotonic, which all processes of a machine share: figures that were written a while ago
still tell how long a lock has been held.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from celery_dislock.locks.lease import Lease

LISTED = 200  # leases that are listed one by one, those that are held longest first


@dataclass
class Counts:
    """
    What a watchdog has counted since its process began.

    Attributes:
        renewals: Leases renewed.
        late: Seconds by which the last renewal was late; an early one counts as 0.
        worst: The largest value that *late* has had.
        outages: Times that renewals began to fail.
        failures: Attempts to renew that failed.
    """

    renewals: int = 0
    late: float = 0.0
    worst: float = 0.0
    outages: int = 0
    failures: int = 0

    def renewed(self, lease: Lease, sent_at: float) -> None:
        """Count a renewal that was sent at *sent_at*; call this before the lease is extended."""
        self.renewals += 1
        if lease.due is not None:
            self.late = max(0.0, sent_at - lease.due)
            self.worst = max(self.worst, self.late)


def written(pid: int, leases: Iterable[Lease], counts: Counts, errors: int) -> dict[str, Any]:
    """
    Return the figures of a process.

    Args:
        pid: Its process id.
        leases: The leases under its watchdog.
        counts: What its watchdog has counted.
        errors: Unexpected exceptions that its watchdog has survived.
    """
    known = sorted(leases, key=lambda lease: lease.since)
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
        "since": lease.since,
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
