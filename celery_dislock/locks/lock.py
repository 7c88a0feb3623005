"""A lock by its keys: how it is taken, waited for and kept."""

from __future__ import annotations

import json
import logging
import math
import time
from typing import TYPE_CHECKING

from celery_dislock import signals
from celery_dislock.exceptions import ForbiddenError, StoreError, UnreachableError
from celery_dislock.locks.attempt import Attempt, Conflict, in_words
from celery_dislock.locks.callers import current_caller
from celery_dislock.locks.lease import RENEWALS_PER_TIMEOUT, Lease, trust_in
from celery_dislock.servers.replies import Granted, Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from celery_dislock.config.options import TaskOptions
    from celery_dislock.locks.watchdog import Watchdog
    from celery_dislock.servers.replies import Handed
    from celery_dislock.servers.store import Store

ASK_AGAIN = 30.0  # seconds after which a waiter asks again at the latest
PLACE_TIMEOUT = (
    3 * ASK_AGAIN
)  # seconds without being asked for, after which a waiter counts as dead
UNHEARD = (0.1, 2.0)  # seconds after a wait that failed, doubled; less than a turn is reserved for
UNSAID = 1  # waits in a row that may fail without a word: connections end
LATE = 0.002  # seconds after a lease's end at which to ask again: the server counts milliseconds

to_json = json.JSONEncoder(separators=(",", ":")).encode

logger = logging.getLogger("celery_dislock")


class Lock:
    """
    A lock by its keys, as one set of options takes it.  Cheap: it holds nothing, a lease does.

    Args:
        keys: What the lock is about.  Several are taken all or not at all, in this order, which is
            to be the same for everybody.
        names: Their names in Redis.
        options: How it is taken and kept.
        store: Where.
        keeper: What renews the leases.
        clock: Monotonic seconds.
        pause: Called with seconds to wait before asking again, if waiting in line fails.

    Attributes:
        timeout: Seconds until a lease expires that is not renewed.
        trust: Seconds for which it is trusted, counted from before it was asked for.
        interval: Seconds between two renewals; None where there are none.
    """

    __slots__ = (
        "clock",
        "interval",
        "keeper",
        "keys",
        "names",
        "options",
        "pause",
        "store",
        "timeout",
        "trust",
    )

    def __init__(
        self,
        keys: Sequence[str],
        names: Sequence[str],
        options: TaskOptions,
        store: Store,
        keeper: Watchdog,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.keys = keys
        self.names = names
        self.options = options
        self.store = store
        self.keeper = keeper
        self.clock = clock
        self.pause = pause
        self.timeout = options.lock_expire or options.lock_watchdog_timeout
        fixed = options.lock_expire is not None
        self.interval = None if fixed else self.timeout / RENEWALS_PER_TIMEOUT
        self.trust = trust_in(self.timeout)

    @property
    def key(self) -> str:
        """The key, or all of them, as a message names them."""
        return " + ".join(self.keys)

    def try_acquire(self, attempt: Attempt, *, fair: bool = True) -> Lease | Conflict:
        """
        Take the lock if it admits one more lease.  Never waits; one round trip.

        Args:
            attempt: Who asks.  An owner that has the lock already is given it again.
            fair: Come after those who wait for it.

        Returns:
            The lease, which the watchdog keeps from here on, or the conflict.

        Raises:
            StoreError: The server did not answer.  The lock may have been taken; if so it frees
                itself after its timeout, or at once by :meth:`abandon`.
        """
        try:
            asked_at = self.clock()
            answer = self._ask(attempt, place=0.0, fair=fair)
            if isinstance(answer, Granted):
                return self.keep(attempt, answer.tokens, asked_at, self.timeout)
            return self.conflict(answer)
        except StoreError:
            raise
        except BaseException:
            self.interrupted(attempt)
            raise

    def acquire(
        self, attempt: Attempt, *, timeout: float | None, fair: bool = True
    ) -> Lease | Conflict:
        """
        Take the lock, waiting in line for it, first come first served.

        Whoever releases the lock hands it to the first in line and wakes that one alone.  A waiter
        asks again when the lease in its way would have run out, so a holder that crashed is
        noticed at that moment; and often enough to keep its place.

        What is handed over is a lease for a few seconds, which the first renewal, soon after,
        brings to its full length.

        Args:
            attempt: Who asks.
            timeout: Seconds to wait; None: for as long as it takes.
            fair: False: pass those who wait, where the lock admits one more.

        Returns:
            The lease, or the conflict that still stood after *timeout*; nothing waits any more.

        Raises:
            LockHeldError: The caller itself has it, and would wait for itself.
            StoreError: As for :meth:`try_acquire`; the place in line is given up, or runs out.
            ForbiddenError: The server does not let this user wait in line.
        """
        current_caller().refuse_to_wait(self)
        give_up_at = math.inf if timeout is None else self.clock() + timeout
        asked = False
        unheard = 0
        try:
            while True:
                asked_at = self.clock()
                answer = self._ask(attempt, place=PLACE_TIMEOUT, fair=fair)
                asked = True
                if isinstance(answer, Granted):
                    return self.keep(attempt, answer.tokens, asked_at, self.timeout)
                left = give_up_at - self.clock()
                if left <= 0:
                    self.abandon(attempt)
                    return self.conflict(answer)
                try:
                    handed = self._wait(attempt, answer, left)
                    unheard = 0
                except ForbiddenError:
                    raise
                except StoreError as exc:
                    unheard += 1
                    self._rest(exc, unheard, left)
                    continue
                if handed is None:
                    continue
                # Dated by the server's clock, from before it was asked on: never too late.
                granted_at = min(self.clock(), asked_at + PLACE_TIMEOUT - handed.place_left)
                if self.clock() < granted_at + trust_in(handed.ttl):
                    return self.keep(attempt, (handed.token,), granted_at, handed.ttl)
        except BaseException as exc:  # a signal handler's, too, at whichever instruction
            if asked or not isinstance(exc, UnreachableError):
                self.interrupted(attempt)
            raise

    def _ask(self, attempt: Attempt, *, place: float, fair: bool) -> Granted | Refused:
        return self.store.acquire(
            self.names,
            attempt.owner,
            self.timeout,
            to_json(attempt.holder),
            mode=self.options.lock_mode,
            limit=self.options.lock_limit,
            place=place,
            fair=fair,
        )

    def _wait(self, attempt: Attempt, refused: Refused, left: float) -> Handed | None:
        """Wait in line; return what can be used as it is, or None: to ask again will tell."""
        pause = min(left, refused.remaining + LATE, ASK_AGAIN)
        if refused.nth:
            pause = min(pause, self.timeout / RENEWALS_PER_TIMEOUT)  # those taken are to be kept
        handed = self.store.wait(self.names[refused.nth], attempt.owner, pause)
        # Asked for in one piece: several locks, and the expiry that no renewal sets.
        return handed if len(self.names) == 1 and self.interval is not None else None

    def _rest(self, error: StoreError, times: int, left: float) -> None:
        """Pause after a wait that failed: the server refuses to wake us, or was away meanwhile."""
        first, most = UNHEARD
        if times == UNSAID + 1:
            logger.warning(
                "Waiting for lock %r without being woken, and asking again after %g s at most: %s",
                *(self.key, most, error),
            )
        # Of several locks, those taken already are to be kept.
        most = min(most, self.timeout / RENEWALS_PER_TIMEOUT)
        self.pause(min(first * 2.0 ** min(times - 1, 10), most, left))

    def conflict(self, refused: Refused) -> Conflict:
        """Name the key that a refusal is about."""
        return Conflict(self.keys[refused.nth], refused.holder, refused.remaining, refused.place)

    def keep(self, attempt: Attempt, tokens: Sequence[int], since: float, ttl: float) -> Lease:
        """
        Make the lease of a attempt that was granted, and have it kept alive.

        Args:
            attempt: Who asked.
            tokens: Of each key.
            since: When it was asked for, by this process's clock.
            ttl: Seconds from then on until the lease ends.

        Raises:
            StoreError: The grant came too late to be trusted; it was given back.
        """
        if self.clock() >= since + trust_in(ttl):
            self.abandon(attempt)
            raise StoreError(self.store.server, "it granted a lock too late to be trusted")
        lease = attempt.lease = Lease(self, attempt, tokens, since, ttl)
        self.keeper.watch(lease)
        signals.lock_acquired.send(sender=attempt.sender, lease=lease)
        return lease

    def interrupted(self, attempt: Attempt) -> None:
        """
        Give up a attempt that an exception has cut short, where it has no lease.

        The keeper does it where a second exception cuts this short, too.
        """
        if attempt.lease is None:
            self.keeper.clear(self.names, attempt.owner)
            if self.abandon(attempt):
                self.keeper.cleared(attempt.owner)

    def abandon(self, attempt: Attempt) -> bool:
        """
        Give up a attempt that was not granted in time: its place, and what it got.

        Returns:
            Whether the server has answered.
        """
        try:
            self.store.release(self.names, attempt.owner)
        except StoreError as exc:
            logger.warning(
                "Lock %r may stay taken for up to %.1f s with no live holder, since %s gave it up "
                "and could not release it: %s",
                *(self.key, self.timeout, in_words(attempt.holder), exc),
            )
            return False
        return True
