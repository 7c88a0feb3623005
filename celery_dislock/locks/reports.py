"""Report what happens to leases: in the log, to the body, the observer and signal receivers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from celery_dislock import signals
from celery_dislock.locks.lease import GONE, End
from celery_dislock.servers.records import in_words

if TYPE_CHECKING:
    from celery_dislock.locks.lease import Lease
    from celery_dislock.locks.observer import Observer

logger = logging.getLogger("celery_dislock")


class Reports:
    """
    Reports on the leases of one process.

    Args:
        observer: Is told of everything.

    Attributes:
        observer: The argument of that name.
    """

    def __init__(self, observer: Observer) -> None:
        self.observer = observer

    def acquired(self, lease: Lease, how: str, waited: float) -> None:
        """Report that a lock was granted; see :meth:`Observer.acquired`."""
        self.observer.acquired(lease, how, waited)
        signals.lock_acquired.send(sender=lease.sender, lease=lease)

    def renewed(self, lease: Lease) -> None:
        """Report that a lease was renewed."""
        self.observer.renewed(lease)
        signals.lock_renewed.send(sender=lease.sender, lease=lease)

    def lost(self, lease: Lease) -> None:
        """Report that a lease is lost, and apply ``lock_on_lost``."""
        action, reason = lease.driver.options.lock_on_lost, lease.why_ended
        logger.error(
            "Lock %r of %s is lost: %s. Another execution may hold it by now; lock_on_lost=%r.",
            *(lease.key, in_words(lease.holder), reason, action),
        )
        try:
            if lease.on_end is not None:
                lease.on_end(lease, action)
        finally:
            self.observer.lost(lease, action, gone=reason in GONE)
            self._ended(lease)
            signals.lock_lost.send(sender=lease.sender, lease=lease, reason=reason)

    def capped(self, lease: Lease) -> None:
        """Report that a lease has reached its cap, and apply ``lock_on_cap``."""
        action = lease.driver.options.lock_on_cap
        logger.warning(
            "Lock %r of %s was renewed %d times, its cap, and ends in %.1f s; lock_on_cap=%r.",
            *(lease.key, in_words(lease.holder), lease.renewals, lease.remaining, action),
        )
        try:
            if lease.on_end is not None:
                lease.on_end(lease, action)
        finally:
            self.observer.capped(lease, action)
            signals.lock_capped.send(sender=lease.sender, lease=lease)

    def abandoned(self, lease: Lease) -> None:
        """Report that the owner of a lease has ended without releasing it."""
        self._ended(lease)
        logger.warning(
            "Lock %r of %s is renewed no more and ends in %.1f s: its owner has ended "
            "without releasing it.",
            *(lease.key, in_words(lease.holder), lease.trust_left),
        )

    def finished(self, lease: Lease, *, expiring: bool) -> None:
        """Report that the owner has ended a lease."""
        self._ended(lease)
        if lease.end is not End.LOST:
            signals.lock_released.send(sender=lease.sender, lease=lease, expiring=expiring)

    def _ended(self, lease: Lease) -> None:
        """Tell the observer once how a lease has ended."""
        if not lease.reported and lease.end is not None:
            lease.reported = True
            self.observer.ended(lease, lease.end, lease.held_for)
