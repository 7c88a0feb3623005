"""A lock by its key: how it is taken, for how long a lease of it is trusted, and how it is kept."""

from __future__ import annotations

import contextlib
import json
import logging
import math
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
ASK_AGAIN = 30.0  # seconds after which a waiter asks again at the latest
PLACE_TIMEOUT = (
    3 * ASK_AGAIN
)  # seconds without being asked for, after which a waiter counts as dead
LATE = 0.002  # seconds after a lease's end at which to ask again: the server counts milliseconds

to_json = json.JSONEncoder(separators=(",", ":")).encode

logger = logging.getLogger("celery_dislock")


class Locking(Protocol):
    """What a lock asks of a store."""

    def acquire(
        self,
        lock: str,
        owner: str,
        ttl: float,
        holder: str,
        *,
        mode: str,
        limit: int,
        place: float,
        fair: bool,
    ) -> Granted | Refused:
        """See :meth:`celery_dislock.store.Store.acquire`."""

    def wait(self, lock: str, owner: str, seconds: float) -> bool:
        """See :meth:`celery_dislock.store.Store.wait`."""

    def extend(self, lock: str, owner: str, ttl: float) -> bool:
        """See :meth:`celery_dislock.store.Store.extend`."""

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

    def try_acquire(self, claim: Claim, *, fair: bool = True) -> Lease | Conflict:
        """
        Take the lock if it admits one more lease.  Never waits; one round trip.

        Args:
            claim: Who asks.  An owner that has the lock already is given it again.
            fair: Come after those who wait for it.

        Returns:
            The lease, which the watchdog keeps from here on, or the conflict.

        Raises:
            StoreError: The server did not answer.  The lock may have been taken; if so it frees
                itself after its timeout, or at once by :meth:`abandon`.
        """
        return self._ask(claim, place=0.0, fair=fair)

    def acquire(
        self, claim: Claim, *, timeout: float | None, fair: bool = True
    ) -> Lease | Conflict:
        """
        Take the lock, waiting in line for it, first come first served.

        Whoever releases the lock hands it to the first in line and wakes that one alone.  A waiter
        asks again when the lease in its way would have run out, so a holder that crashed is
        noticed at that moment; and often enough to keep its place.

        Args:
            claim: Who asks.
            timeout: Seconds to wait; None: for as long as it takes.
            fair: False: pass those who wait, where the lock admits one more.

        Returns:
            The lease, or the conflict that still stood after *timeout*; nothing waits any more.

        Raises:
            StoreError: As for :meth:`try_acquire`; the place in line is given up, or runs out.
        """
        give_up_at = math.inf if timeout is None else self.clock() + timeout
        try:
            while True:
                answer = self._ask(claim, place=PLACE_TIMEOUT, fair=fair)
                if isinstance(answer, Lease):
                    return answer
                left = give_up_at - self.clock()
                if left <= 0:
                    self.abandon(claim)
                    return answer
                # Not woken up to there, or not able to wait: the next answer tells.
                with contextlib.suppress(StoreError):
                    self.store.wait(
                        self.name, claim.owner, min(left, answer.remaining + LATE, ASK_AGAIN)
                    )
        except BaseException:  # a signal handler's, at whichever instruction
            if claim.lease is None:
                self.abandon(claim)
            raise

    def _ask(self, claim: Claim, *, place: float, fair: bool) -> Lease | Conflict:
        sent_at = self.clock()
        answer = self.store.acquire(
            self.name,
            claim.owner,
            self.timeout,
            to_json(claim.holder),
            mode=self.options.lock_mode,
            limit=self.options.lock_limit,
            place=place,
            fair=fair,
        )
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
        """Give up a claim that was interrupted, or came too late: its place, and what it got."""
        try:
            self.store.release(self.name, claim.owner)
        except StoreError as exc:
            logger.warning(
                "Lock %r may be held for %.1f s by nobody: %s", self.key, self.timeout, exc
            )
