"""A lock by its key: how it is taken, for how long a lease of it is trusted, and how it is kept."""

from __future__ import annotations

import json
import logging
import time
from typing import TYPE_CHECKING, Protocol

from celery_dislock import signals
from celery_dislock.exceptions import StoreError
from celery_dislock.leases import Claim, Conflict, Lease
from celery_dislock.store import Granted

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery_dislock.settings import TaskOptions
    from celery_dislock.store import Refused

TRUST_MARGIN = 0.5  # seconds before a lease's expiry at which trust in it ends: time to stop a body
TRUST_MARGIN_RATIO = 0.1  # of the timeout, where that is less
RENEWALS_PER_TIMEOUT = 3  # two may fail in a row before the lease is lost

to_json = json.JSONEncoder(separators=(",", ":")).encode

logger = logging.getLogger("celery_dislock")


class Locking(Protocol):
    """What a lock asks of a store."""

    def acquire(self, lock: str, owner: str, ttl: float, holder: str) -> Granted | Refused:
        """See :meth:`celery_dislock.store.Store.acquire`."""

    def release(self, lock: str, owner: str, at_least: float = 0.0) -> bool:
        """See :meth:`celery_dislock.store.Store.release`."""


class Keeper(Protocol):
    """What keeps leases alive: the watchdog."""

    def watch(self, lease: Lease) -> None:
        """Renew the lease from now on, and notice when it is lost."""

    def unwatch(self, lease: Lease) -> None:
        """Leave the lease alone from now on."""


class Lock:
    """
    A lock by its key, as one set of options takes it.  Cheap: it holds nothing, a lease does.

    Args:
        key: What the lock is about.
        name: Its name in Redis.
        options: How it is taken and kept.
        store: Where.
        keeper: What renews the leases.
        clock: Monotonic seconds.

    Attributes:
        timeout: Seconds until a lease expires that is not renewed.
        trust: Seconds for which it is trusted, counted from before it was asked for.
        interval: Seconds between two renewals; None where there are none.
    """

    __slots__ = (
        "clock",
        "interval",
        "keeper",
        "key",
        "name",
        "options",
        "store",
        "timeout",
        "trust",
    )

    def __init__(
        self,
        key: str,
        name: str,
        options: TaskOptions,
        store: Locking,
        keeper: Keeper,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.key = key
        self.name = name
        self.options = options
        self.store = store
        self.keeper = keeper
        self.clock = clock
        self.timeout = options.lock_expire or options.lock_watchdog_timeout
        fixed = options.lock_expire is not None
        self.interval = None if fixed else self.timeout / RENEWALS_PER_TIMEOUT
        self.trust = self.timeout - min(TRUST_MARGIN, self.timeout * TRUST_MARGIN_RATIO)

    def try_acquire(self, claim: Claim) -> Lease | Conflict:
        """
        Take the lock if nobody holds it.  Never waits; one round trip.

        Args:
            claim: Who asks.  An owner that has the lock already is given it again.

        Returns:
            The lease, which the watchdog keeps from here on, or the conflict.

        Raises:
            StoreError: The server did not answer.  The lock may have been taken; if so it frees
                itself after its timeout, or at once by :meth:`abandon`.
        """
        sent_at = self.clock()
        holder = to_json(claim.holder)
        answer = self.store.acquire(self.name, claim.owner, self.timeout, holder)
        if not isinstance(answer, Granted):
            return Conflict(self.key, answer.holder, answer.remaining)
        if self.clock() >= sent_at + self.trust:
            self.abandon(claim)
            raise StoreError(self.name, "granted, but too late to be trusted")
        lease = claim.lease = Lease(self, claim, answer.token, sent_at)
        self.keeper.watch(lease)
        signals.lock_acquired.send(sender=claim.sender, lease=lease)
        return lease

    def abandon(self, claim: Claim) -> None:
        """Release what an acquisition may have taken that was interrupted before it returned."""
        try:
            self.store.release(self.name, claim.owner)
        except StoreError as exc:
            logger.warning(
                "Lock %r may be held for %.1f s by nobody: %s", self.key, self.timeout, exc
            )
