"""One owner's hold on a lock.

A lease is trusted until ``sent_at + timeout - margin``, where ``sent_at`` is the monotonic time
before the acquisition or the last successful renewal was *sent*: a slow reply shortens trust,
never stretches it.  Past that instant the lease is lost for good, even if the server would still
extend it: whoever asked it in between was told so, and may have acted on it.

What a lease is at any moment follows from two facts: when trust ends, and which of the ends below
it has met.  It meets at most one.

============  ====================================================================
end           how it came
============  ====================================================================
released      its owner is done with it
expiring      its owner is done with it, and leaves it to run out
lost          this process can no longer trust it
============  ====================================================================
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from celery_dislock import signals
from celery_dislock.exceptions import LockLostError, StoreError
from celery_dislock.locks.attempt import in_words

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from weakref import ref

    from celery_dislock.locks.attempt import Attempt
    from celery_dislock.locks.callers import Caller
    from celery_dislock.locks.lock import Lock

TRUST_MARGIN = 0.5  # seconds before a lease's expiry at which trust in it ends: time to stop a body
TRUST_MARGIN_RATIO = 0.1  # of the timeout, where that is less
RENEWALS_PER_TIMEOUT = 3  # two may fail in a row before the lease is lost

logger = logging.getLogger("celery_dislock")


def trust_in(ttl: float) -> float:
    """Return for how many seconds a lease is trusted that the server ends after *ttl*."""
    return ttl - min(TRUST_MARGIN, ttl * TRUST_MARGIN_RATIO)


class Lease:
    """
    One owner's hold on a lock, with a deadline.  Made by :meth:`Lock.try_acquire`.

    It belongs to the process that took it: a copy in a forked child is not held there, and its
    release does nothing.

    Attributes:
        key: The key of the lock; of several locks, all keys in one text.
        owner: The string that identifies this acquisition.
        tokens: The fencing token of each lock, by key.  It grows with each new lease of that lock:
            a resource that remembers the highest it has seen can refuse a holder that was
            overtaken.
        renewals: How often the lease has been renewed.
        capped: True once the cap stopped the renewals.
        finished: True once its owner is done with it, and the server was told.
        lost: True once this process can no longer trust the lease, though it had not released it.
    """

    __slots__ = (
        "_ended",
        "_pid",
        "_released",
        "_reserved",
        "acquired_at",
        "caller",
        "capped",
        "due",
        "finished",
        "holder",
        "key",
        "lock",
        "lost",
        "on_end",
        "owner",
        "renewals",
        "sender",
        "tokens",
        "trusted_until",
        "watch_number",
    )

    def __init__(
        self, lock: Lock, attempt: Attempt, tokens: Sequence[int], since: float, ttl: float
    ) -> None:
        self.lock = lock
        self.key = lock.key
        self.owner = attempt.owner
        self.holder = attempt.holder
        self.sender = attempt.sender
        self.caller: ref[Caller] | None = attempt.caller  # whose end ends the renewals
        self.tokens = dict(zip(lock.keys, tokens, strict=True))
        self.renewals = 0
        self.capped = False
        self.on_end: Callable[[Lease, str], None] | None = None
        self.watch_number = 0  # the keeper's
        self.acquired_at = since
        self.trusted_until = since + trust_in(ttl)
        # When it is to be renewed; None: never.
        self.due = None if lock.interval is None else since + ttl / RENEWALS_PER_TIMEOUT
        self._reserved = ttl < lock.timeout  # until the renewal that gives it its full length
        self.lost = False
        self._ended = ""  # how, in words
        self._released = False  # a release was sent, and may have been carried out
        self.finished = False
        self._pid = os.getpid()

    @property
    def token(self) -> int:
        """The fencing token; of several locks, that of the first key in their order."""
        return next(iter(self.tokens.values()))

    @property
    def held(self) -> bool:
        """Whether this process may still trust the lease; asks the local clock, not the server."""
        return not self._over and self.lock.clock() < self.trusted_until

    @property
    def remaining(self) -> float:
        """Seconds for which the lease is trusted if it is not renewed; 0 where it is not held."""
        if self._over:
            return 0.0
        return max(0.0, self.trusted_until - self.lock.clock())

    @property
    def why_ended(self) -> str:
        """Why the lease is held no more, or soon will be, in words; empty where it is held."""
        if self._over:
            return self._over
        if self.capped:
            return f"it was renewed {self.renewals} times, its cap"
        return "" if self.held else "its time ran out"

    @property
    def _over(self) -> str:
        """How it met its end, in words; empty where it has met none."""
        if self._pid != os.getpid():
            return "it belongs to the process that this one was forked from"
        return self._ended

    @property
    def abandoned(self) -> bool:
        """Whether the thread or greenlet that took it has ended without releasing it."""
        if self.caller is None:
            return False
        caller = self.caller()
        return caller is None or caller.dead

    def ensure_held(self) -> None:
        """
        Return if the lease is held; never waits, asks the local clock.

        Call it before a step that must not be done twice, and give that step the token.

        Raises:
            LockLostError: Another execution may hold the lock by now.
        """
        if not self.held:
            raise LockLostError(self.key, self.why_ended)

    def extend(self, sent_at: float) -> None:
        """Trust the lease anew after a renewal that was sent at *sent_at*."""
        self.trusted_until = sent_at + self.lock.trust
        if self.due is not None:
            self.due = sent_at + self.lock.timeout / RENEWALS_PER_TIMEOUT
        if self._reserved:
            self._reserved = False
        else:
            self.renewals += 1

    def renew(self) -> bool:
        """
        Renew the lease now; one round trip.

        Returns:
            False where the server no longer has it: then it is lost.

        Raises:
            StoreError: The server did not answer; the lease is what it was before.
        """
        lock = self.lock
        sent_at = lock.clock()
        if lock.store.extend(lock.names, self.owner, lock.timeout):
            self.extend(sent_at)
            return True
        lock.keeper.unwatch(self)
        if not self._ended:
            self.lose("the server no longer has it: expired, taken or deleted")
            self.report_lost()
        return False

    def lose(self, reason: str) -> None:
        """Trust the lease no more; called by its keeper, under the mutex that unwatch waits for."""
        self.lost = True
        self._ended = reason

    def report_lost(self) -> None:
        """Say that the lease can no longer be trusted, and do what was asked for then."""
        action = self.lock.options.lock_on_lost
        logger.error(
            "Lock %r of %s is lost: %s. Another execution may hold it by now; lock_on_lost=%r.",
            self.key,
            in_words(self.holder),
            self._ended,
            action,
        )
        try:
            if self.on_end is not None:
                self.on_end(self, action)
        finally:
            signals.lock_lost.send(sender=self.sender, lease=self, reason=self._ended)

    def report_capped(self) -> None:
        """Say that the lease is renewed no more, and do what was asked for then."""
        self.capped = True
        action = self.lock.options.lock_on_cap
        logger.warning(
            "Lock %r of %s was renewed %d times, its cap, and ends in %.1f s; lock_on_cap=%r.",
            self.key,
            in_words(self.holder),
            self.renewals,
            self.remaining,
            action,
        )
        try:
            if self.on_end is not None:
                self.on_end(self, action)
        finally:
            signals.lock_capped.send(sender=self.sender, lease=self)

    def report_abandoned(self) -> None:
        """Say that whoever took the lease has ended without releasing it."""
        self._ended = "the thread or greenlet that took it has ended"
        logger.warning(
            "Lock %r of %s is renewed no more and ends in %.1f s: whoever took it has ended "
            "without releasing it.",
            self.key,
            in_words(self.holder),
            max(0.0, self.trusted_until - self.lock.clock()),
        )

    def release(
        self, *, at_least: float | None = None, ticket: str = "", settles: float = 0.0
    ) -> None:
        """
        End the lease; one round trip, and none where that was done before.

        A lease that the server no longer has is reported as lost.  A server that is away does not
        raise: the lease then ends with its expiry, and the log says when.

        Args:
            at_least: Seconds since its acquisition until which it runs out instead; None: as the
                options say.
            ticket: Of a parked task that is done with it; see
                :meth:`celery_dislock.servers.store.Store.release`.
            settles: See there.
        """
        if self.finished or self._pid != os.getpid():
            return
        self._stop("released")
        held = self._finish(self._at_least(at_least), ticket, settles)
        if not held and not self.lost:
            if self.capped:  # that was told
                self.lose(f"it was renewed {self.renewals} times, its cap, and ran out")
            else:
                self.lose("it was gone when it was released: expired, taken or deleted")
                self.report_lost()
        self.finished = True
        if not self.lost:
            signals.lock_released.send(sender=self.sender, lease=self, expiring=False)

    def leave(
        self, *, at_least: float | None = None, ticket: str = "", settles: float = 0.0
    ) -> None:
        """Stop renewing the lease and let it run out; the arguments are those of `release`."""
        if self.finished or self._pid != os.getpid():
            return
        self._stop("left to expire")
        at_least = self._at_least(at_least)
        if self._reserved:
            self._finish(max(at_least, self.lock.timeout), ticket, settles)
        elif at_least or ticket:
            expiry = self.trusted_until - self.lock.trust + self.lock.timeout
            self._finish(max(at_least, expiry - self.acquired_at), ticket, settles)
        self.finished = True
        if not self.lost:
            signals.lock_released.send(sender=self.sender, lease=self, expiring=True)

    def _stop(self, end: str) -> None:
        self.lock.keeper.unwatch(self)
        self._ended = self._ended or end

    def _at_least(self, given: float | None) -> float:
        return self.lock.options.lock_at_least_for if given is None else given

    def _finish(self, at_least: float, ticket: str, settles: float) -> bool:
        """Send the release; return False where the lease was gone before it was first sent."""
        lock = self.lock
        trusted = lock.clock() < self.trusted_until
        sent_before, self._released = self._released, True  # and then cut short by an exception
        try:
            ended = lock.store.release(lock.names, self.owner, at_least, ticket, settles)
        except StoreError as exc:
            logger.warning(
                "Lock %r of %s could not be released and ends by itself within %.1f s: %s",
                self.key,
                in_words(self.holder),
                self.lock.timeout,
                exc,
            )
            return trusted
        return ended or sent_before

    def __repr__(self) -> str:
        state = self._over or ("held" if self.held else "ended")
        return f"<Lease of {self.key!r} by {self.owner}: {state}, token {self.token}>"
