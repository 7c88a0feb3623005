"""One owner's hold on a lock.

A lease is trusted until ``sent_at + timeout - margin``.  ``sent_at`` is the monotonic time just
before the acquisition or the last successful renewal was *sent*.  A slow reply therefore shortens
the trust and never extends it.  After that time the watchdog marks the lease as lost, and it stays
lost even if the server could still extend it: the owner may already have been told, and acted on
it.

The state of a lease follows from the time when the trust ends and from how the lease has ended.
It has ended in at most one of these ways:

============  ====================================================================
end           reason
============  ====================================================================
released      its owner has released it
expiring      its owner has left it to expire
abandoned     the thread or greenlet that took it ended without releasing it
lost          this process can no longer trust it
============  ====================================================================
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING

from celery_dislock import signals
from celery_dislock.config.options import RENEWALS_PER_TIMEOUT
from celery_dislock.exceptions import LockLostError, StoreError
from celery_dislock.servers.records import in_words
from celery_dislock.servers.store import RELEASED, LateRelease

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from weakref import ref

    from celery_dislock.locks.attempt import Attempt
    from celery_dislock.locks.callers import Caller
    from celery_dislock.locks.lock import Lock
    from celery_dislock.servers.reservations import Reservation
    from celery_dislock.servers.store import Ending

TRUST_MARGIN = 0.5  # seconds before a lease's expiry at which trust in it ends: time to stop a body
TRUST_MARGIN_RATIO = 0.1  # of the timeout, used if that is shorter than TRUST_MARGIN
GONE = "expired, taken or deleted"  # end of the reason if the server no longer has a lease

logger = logging.getLogger("celery_dislock")


def trust_in(ttl: float) -> float:
    """Return the seconds for which a lease with an expiry of *ttl* seconds is trusted."""
    return ttl - min(TRUST_MARGIN, ttl * TRUST_MARGIN_RATIO)


def wall_time(when: float, clock: Callable[[], float]) -> float:
    """Return the UNIX time of a time on *clock*; a clock that a test drives tells UNIX time."""
    return when + time.time() - clock() if clock is time.monotonic else when


class Lease:
    """
    One owner's hold on a lock, with a deadline.  Made when a lock is taken.

    The lease belongs to the process that took it.  In a forked child the copy counts as not held,
    and releasing it does nothing.

    Attributes:
        key: The key of the lock; of several locks, all keys in one text.
        owner: The string that identifies this acquisition.
        tokens: The fencing token of each lock, by key.  Each new lease of a lock has a larger
            token.  A resource that remembers the largest token can refuse an outdated holder.
        renewals: Number of renewals of the lease.
        capped: True once the cap has stopped the renewals.
        finished: True once the lease was released, or left to expire.  A release may have failed:
            then the lease ends with its expiry.
        lost: True once this process can no longer trust the lease and has not released it.
        reservation: The reservation of its key, which is renewed with it; None: none.
    """

    __slots__ = (
        "_ended",
        "_pid",
        "_released",
        "_reserved",
        "_told_end",
        "asked_until",
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
        "reservation",
        "sender",
        "since",
        "tokens",
        "trace",
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
        self.trace = attempt.trace
        self.caller: ref[Caller] | None = attempt.caller  # renewals stop when it ends
        self.tokens = dict(zip(lock.keys, tokens, strict=True))
        self.renewals = 0
        self.reservation: Reservation | None = None
        self.capped = False
        self.on_end: Callable[[Lease, str], None] | None = None
        self.watch_number = 0  # set by the watchdog
        self.since = since  # on this process's clock, before the request was sent
        self.trusted_until = since + trust_in(ttl)
        self.asked_until = 0.0  # beyond the trust; see Watchdog.asks
        # Monotonic time of the next renewal; None: no renewals.
        self.due = None if lock.interval is None else since + ttl / RENEWALS_PER_TIMEOUT
        self._reserved = ttl < lock.timeout  # until the first renewal sets the full timeout
        self.lost = False
        self._ended = ""  # how it ended, as a text
        self._released = False  # True: a release was sent, and may have been carried out
        self.finished = False
        self._told_end = False
        self._pid = os.getpid()

    @property
    def token(self) -> int:
        """The fencing token; of several locks, the token of the first key."""
        return next(iter(self.tokens.values()))

    @property
    def held(self) -> bool:
        """
        Whether this process may still trust the lease.

        Reads the local clock, not the server.  The exception is a pool process that was stalled
        until now: the worker's main process may have renewed the lease meanwhile, and only the
        server knows.  It is asked then, in one round trip.  False if it does not answer.
        """
        try:
            return self.confirm()
        except StoreError:
            return False

    @property
    def remaining(self) -> float:
        """Seconds for which the lease is trusted unless renewed; 0 if it is not held."""
        return max(0.0, self.trusted_until - self.lock.clock()) if self.held else 0.0

    @property
    def acquired_at(self) -> float:
        """
        UNIX time just before the lock was asked for, by this machine's clock.

        ``datetime.fromtimestamp(lease.acquired_at)`` shows it to people.
        """
        return wall_time(self.since, self.lock.clock)

    @property
    def why_ended(self) -> str:
        """Text that says why the lease has ended, or was capped; empty if it is held."""
        if self._over:
            return self._over
        if self.capped:
            return f"it was renewed {self.renewals} times, its cap"
        return "" if self._is_trusted else "its time ran out"

    @property
    def _is_trusted(self) -> bool:
        return not self._over and self.lock.clock() < self.trusted_until

    @property
    def _over(self) -> str:
        """Text that says how the lease has ended; empty if it has not."""
        if self._pid != os.getpid():
            return "it belongs to the process that this one was forked from"
        return self._ended

    @property
    def kept_until(self) -> float:
        """Monotonic time until which the lease may still be renewed, and is not lost."""
        return max(self.trusted_until, self.asked_until)

    @property
    def abandoned(self) -> bool:
        """Whether the thread or greenlet that took it has ended without releasing it."""
        if self.caller is None:
            return False
        caller = self.caller()
        return caller is None or caller.dead

    def ensure_held(self) -> None:
        """
        Raise an error if the lease is not held.  Blocks only where :attr:`held` asks the server.

        Call this before a step that must not run twice, and pass the token to that step.

        Raises:
            LockLostError: Another execution may hold the lock by now.
        """
        try:
            held = self.confirm()
        except StoreError as exc:
            raise LockLostError(self.key, f"{self.why_ended}, and {exc}") from exc
        if not held:
            raise LockLostError(self.key, self.why_ended)

    def confirm(self) -> bool:
        """
        Return whether the lease is held, as :attr:`held` does.

        Raises:
            StoreError: The server was asked, and did not answer.
        """
        if self._is_trusted:
            return True
        if self._over or self.capped or self.due is None or not self.lock.keeper.asks:
            return False
        return self.renew()

    def extend(self, sent_at: float) -> None:
        """Extend the trust after a successful renewal that was sent at *sent_at*."""
        interval = self.lock.interval
        if self.due is not None and interval is not None:
            if sent_at >= self.trusted_until:  # others renewed it meanwhile, at the same intervals
                self.renewals += int((sent_at - self.due) / interval)
            self.due = sent_at + interval
        self.trusted_until = sent_at + self.lock.trust
        if self._reserved:
            self._reserved = False
        else:
            self.renewals += 1

    def renew(self) -> bool:
        """
        Renew the lease now; one round trip.

        Returns:
            False if the server no longer has the lease.  The lease is lost then.

        Raises:
            StoreError: The server did not answer.  The trust in the lease is unchanged.
        """
        lock = self.lock
        sent_at = lock.clock()
        if lock.store.extend(lock.names, self.owner, lock.timeout):
            self.extend(sent_at)
            return True
        lock.keeper.unwatch(self)
        if not self._ended:
            self.lose(f"the server no longer has it: {GONE}")
            self.report_lost()
        return False

    def lose(self, reason: str) -> None:
        """Mark the lease as lost.

        Called by the watchdog under its mutex, or after :meth:`Watchdog.unwatch`.
        """
        self.lost = True
        self._ended = reason

    def report_lost(self) -> None:
        """Log that the lease is lost, apply ``lock_on_lost``, and send ``lock_lost``."""
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
            self.lock.observer.lost(self, action, gone=self._ended.endswith(GONE))
            self._tell_end("lost")
            signals.lock_lost.send(sender=self.sender, lease=self, reason=self._ended)

    def report_capped(self) -> None:
        """Log that the cap is reached, apply ``lock_on_cap``, and send ``lock_capped``."""
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
            self.lock.observer.capped(self, action)
            signals.lock_capped.send(sender=self.sender, lease=self)

    def report_abandoned(self) -> None:
        """Log that the thread or greenlet that took the lease has ended without releasing it."""
        self._ended = "the thread or greenlet that took it has ended"
        self._tell_end("abandoned")
        logger.warning(
            "Lock %r of %s is renewed no more and ends in %.1f s: the thread or greenlet "
            "that took it ended without releasing it.",
            self.key,
            in_words(self.holder),
            max(0.0, self.trusted_until - self.lock.clock()),
        )

    def release(self, ending: Ending = RELEASED) -> None:
        """
        End the lease; one round trip, or none if that was done before.

        It lasts for ``lock_at_least_for`` seconds from its acquisition, or for as long as the
        ending says.  If it is left to expire, it is not renewed any more.

        If the server no longer has the lease, the lease is reported as lost.  If the server does
        not answer, no error is raised: the watchdog releases the lease when the server answers
        again, or the lease ends with its expiry.  The log says when.
        """
        if self.finished or self._pid != os.getpid():
            return
        self.lock.keeper.unwatch(self)
        self._ended = self._ended or ("left to expire" if ending.expires else "released")
        at_least = max(ending.at_least, self.lock.options.lock_at_least_for)
        if not ending.expires:
            self._release(ending._replace(at_least=at_least))
        elif self._reserved:
            self._send(ending._replace(at_least=max(at_least, self.lock.timeout)))
        elif at_least or ending.ticket or ending.reservation or self.lock.keeper.asks:
            # If the keeper asks, this keeps others from renewing the lease.
            renewed = self.trusted_until - self.lock.trust
            if self.lock.keeper.asks and self.lock.clock() >= self.trusted_until:
                renewed = self.lock.clock()  # at the latest, by the main process
            expiry = renewed + self.lock.timeout
            self._send(ending._replace(at_least=max(at_least, expiry - self.since)))
        self.finished = True
        self._tell_end("expiring" if ending.expires else "released")
        if not self.lost:
            signals.lock_released.send(sender=self.sender, lease=self, expiring=ending.expires)

    def _release(self, ending: Ending) -> None:
        """Send the release, and report the lease as lost if it was gone before."""
        held = self._send(ending)
        if not held and not self.lost:
            if self.capped:  # the cap was reported before
                self.lose(f"it was renewed {self.renewals} times, its cap, and ran out")
            else:
                self.lose(f"it was gone when it was released: {GONE}")
                self.report_lost()

    def _tell_end(self, end: str) -> None:
        """Tell the observer how the lease has ended; once."""
        if not self._told_end:
            self._told_end = True
            held = self.lock.clock() - self.since
            self.lock.observer.ended(self, "lost" if self.lost else end, held)

    def _send(self, ending: Ending) -> bool:
        """
        Send the release; return False if the lease was gone when it should have been held.

        A lease may expire while its release is on its way: a greenlet that sends it waits for a hub
        that computes, or a connection is made anew.  It was held until its owner was done.
        """
        lock = self.lock
        trusted = lock.clock() < self.trusted_until
        # An earlier call may have been interrupted by an exception after it had sent the release.
        sent_before, self._released = self._released, True
        try:
            ended = lock.store.release(lock.names, self.owner, ending)
        except StoreError as exc:
            late = LateRelease(lock.names, self.owner, ending)
            lock.keeper.clear(late, timeout=lock.timeout)
            logger.warning(
                "Lock %r of %s could not be released and ends by itself within %.1f s, or when the "
                "lock server answers again: %s",
                self.key,
                in_words(self.holder),
                self.lock.timeout,
                exc,
            )
            return trusted
        return ended or sent_before or (trusted and lock.clock() >= self.trusted_until)

    def __bool__(self) -> bool:
        """False for a body that runs without a lock alone; see :attr:`held` for what is lost."""
        return True

    def __repr__(self) -> str:
        state = self._over or ("held" if self._is_trusted else "ended")
        return f"<Lease of {self.key!r} by {self.owner}: {state}, token {self.token}>"


class NoLease(Lease):
    """
    The lease of a body that runs without a lock, such as one that is called as a function: falsy.

    It is not held, has the key "" and the token 0, which is smaller than that of any lease.  No
    lock was taken that could be lost, so :meth:`ensure_held` raises nothing.
    """

    __slots__ = ()

    def __init__(self) -> None:
        self.key = self.owner = ""
        self.holder = {}
        self.tokens = {}
        self.renewals = 0
        self.reservation = None
        self.capped = self.lost = False
        self.finished = True

    token = property(lambda _self: 0)
    acquired_at = property(lambda _self: 0.0)
    _over = property(lambda _self: "not locked")

    def confirm(self) -> bool:
        """Return False."""
        return False

    def ensure_held(self) -> None:
        """Do nothing: whoever runs the body without its lock has decided so."""

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "<Lease: not locked>"


NOT_LOCKED = NoLease()
