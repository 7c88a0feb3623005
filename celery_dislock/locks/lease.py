"""An attempt to take a lock, and the lease that it gets.

A lease is trusted until ``sent_at + timeout - margin``.  ``sent_at`` is the monotonic time just
before the acquisition or the last successful renewal was *sent*.  A slow reply therefore shortens
the trust and never extends it.  After that time the watchdog marks the lease as lost, and it stays
lost even if the server could still extend it: the owner may already have been told, and acted on
it.

Nothing here sends or waits: the lock does so for its leases.
"""

from __future__ import annotations

import os
import time
from contextvars import ContextVar
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

from celery_dislock.clock import monotonic
from celery_dislock.config.options import RENEWALS_PER_TIMEOUT
from celery_dislock.exceptions import LockLostError, StoreError, SupersededError
from celery_dislock.servers.bridge import run_on_loop
from celery_dislock.servers.records import write_holder
from celery_dislock.servers.requests import RELEASED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from celery_dislock.config.options import TaskOptions
    from celery_dislock.servers.requests import Ending
    from celery_dislock.servers.reservations import OwnReservation

TRUST_MARGIN = 0.5  # seconds before a lease's expiry at which trust in it ends: time to stop a body
TRUST_KEPT = 100  # results of trust_in() that are kept: mostly those of timeouts in the settings
TRUST_MARGIN_RATIO = 0.1  # of the timeout: the margin, if that is shorter than TRUST_MARGIN
EARLY_BY = 1 / 20  # of the renewal interval: a renewal may be so early, to join a batch

AT_ONCE, WAITED, WAS_PARKED, PUT_OFF = "at_once", "waited", "parked", "put_off"  # Attempt.how

GONE_WHEN_RENEWED = "the server no longer has it: expired, taken or deleted"
GONE_WHEN_RELEASED = "it was gone when it was released: expired, taken or deleted"
GONE = {GONE_WHEN_RENEWED, GONE_WHEN_RELEASED}  # reasons of a loss that the server has told


@lru_cache(TRUST_KEPT)
def trust_in(ttl: float) -> float:
    """Return the seconds for which a lease with an expiry of *ttl* seconds is trusted."""
    return ttl - min(TRUST_MARGIN, ttl * TRUST_MARGIN_RATIO)


def wall_time(when: float, clock: Callable[[], float]) -> float:
    """Return the UNIX time of a time on *clock*; a clock that a test drives tells UNIX time."""
    tells_monotonic = clock in (monotonic, time.monotonic)
    return when + time.time() - clock() if tells_monotonic else when


class End(str, Enum):
    """How a lease has ended."""

    RELEASED = "released"  # by its owner
    EXPIRING = "expiring"  # its owner has left it to expire
    ABANDONED = "abandoned"  # its owner has ended without releasing it
    LOST = "lost"  # this process can no longer trust it


ENDED_BY_OWNER = {End.RELEASED, End.EXPIRING}

WHY_ENDED = {
    End.RELEASED: "released",
    End.EXPIRING: "left to expire",
    End.ABANDONED: "its owner has ended",
}


class LeasedLock(Protocol):
    """The lock of a lease: it sends for the lease, and waits for the replies."""

    names: Sequence[str]
    key: str
    options: TaskOptions
    timeout: float
    interval: float | None

    @property
    def clock(self) -> Callable[[], float]:
        """Returns monotonic seconds."""

    @property
    def asks(self) -> bool:
        """Whether another process may renew the lease, so that only the server knows its end."""

    def renew(self, lease: Lease) -> bool:
        """Renew the lease now; False if the server no longer has it."""

    def spent(self, lease: Lease, cost: int) -> bool:
        """Count what the lease's start has cost; False if the server no longer has the lease."""

    def look_at(self, lease: Lease) -> None:
        """Ask the server soon whether a newer task waits for the lease to end."""

    def end(self, lease: Lease, ending: Ending) -> None:
        """End the lease."""


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
        holder: Description of the owner for others: task, id, worker, pid.
        renewals: Number of renewals of the lease.
        capped: True once the cap has stopped the renewals.
        finished: True once the lease was released, or left to expire.  A release may have failed:
            then the lease ends with its expiry.
        reservation: The attempt's.
        superseded: Id of a newer task of the key that waits for this lease to end; empty: none
            that this process knows of.
        told_at: Time at which the body was told of the newer task, on this process's clock; None:
            it was not told.
        terminated: Whether the body was terminated, as it did not end: ``lock_cancel_after``.
        since: Time before the lock was asked for, on this process's clock.
        caller_ended: Returns whether nobody is left who could release the lock.  None: somebody is
            always left, as with the lock of a task, which ends with its execution.
        on_end: Called with the lease and an action, such as "raise", when the lease is lost or
            capped, or a newer task waits for it; by itself it stops nobody.
        end: How the lease has ended; None: it has not.
    """

    renewals = 0
    capped = finished = False
    reported = False  # whether its end was reported on the channel
    superseded = ""
    told_at: float | None = None
    terminated = False
    end: End | None = None
    caller_ended: Callable[[], bool] | None = None
    on_end: Callable[[Lease, str], None] = staticmethod(lambda _lease, _action: None)
    _reason = ""  # of a loss

    def __init__(
        self,
        lock: LeasedLock,
        attempt: Attempt,
        tokens: Mapping[str, int],
        since: float,
        ttl: float,
    ) -> None:
        self.lock = lock
        self.key = lock.key
        self.owner = attempt.owner
        self.holder = attempt.holder
        # Weak: otherwise a lock that only its lease refers to would live as long as it is renewed.
        self._sender = None if attempt.sender is None else ref(attempt.sender)
        self.trace = attempt.trace
        self.reservation = attempt.reservation
        self.tokens = tokens
        self.since = self.renewed_at = since
        self._counted_at = since  # when the last renewal was sent that counts towards the cap
        # Monotonic time of the next renewal; None: no renewals.
        self.due = None if lock.interval is None else since + ttl / RENEWALS_PER_TIMEOUT
        self.trusted_until = since + trust_in(ttl)
        self._handed_on = ttl < lock.timeout  # until the first renewal sets the full timeout
        self._pid = os.getpid()

    @property
    def sender(self) -> object:
        """Sender of the signals about the lease: a task or a lock; None if that is gone."""
        return None if self._sender is None else self._sender()

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
    def lost(self) -> bool:
        """Whether this process can no longer trust the lease, and has not released it."""
        return self.end is End.LOST

    @property
    def remaining(self) -> float:
        """Seconds for which the lease is trusted unless renewed; 0 if it is not held."""
        return self.trust_left if self.held else 0.0

    @property
    def acquired_at(self) -> float:
        """
        UNIX time just before the lock was asked for, by this machine's clock.

        ``datetime.fromtimestamp(lease.acquired_at)`` shows it to people.
        """
        return wall_time(self.since, self.lock.clock)

    @property
    def held_for(self) -> float:
        """Seconds since the lock was asked for."""
        return self.lock.clock() - self.since

    @property
    def why_ended(self) -> str:
        """Text that says why the lease has ended, or was capped; empty if it is held."""
        if self.is_inherited:
            return "it belongs to the process that this one was forked from"
        if self.end is not None:
            return self._reason or WHY_ENDED[self.end]
        if self.capped:
            return f"it was renewed {self.renewals} times, its cap"
        return "" if self._is_trusted else "its time ran out"

    @property
    def is_inherited(self) -> bool:
        """Whether this is a copy that a forked child has inherited."""
        return self._pid != os.getpid()

    @property
    def _is_trusted(self) -> bool:
        return self.end is None and not self.is_inherited and self.trust_left > 0

    @property
    def trust_left(self) -> float:
        """Seconds until the trust ends unless the lease is renewed, even if it has ended."""
        return max(0.0, self.trusted_until - self.lock.clock())

    def ensure_held(self) -> None:
        """
        Raise an error if the lease is not held.  Blocks only where :attr:`held` asks the server.

        Call this before a step that must not run twice, and pass the token to that step.

        Raises:
            LockLostError: Another execution may hold the lock by now.
            SupersededError: The lease is held, and the body was told to end for a newer task.
        """
        if self.told_at is not None:
            raise SupersededError(self.key, self.superseded)
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
        has_ended = self.end is not None or self.capped or self.is_inherited
        if has_ended or self.due is None or not self.lock.asks:
            return False
        return self.lock.renew(self)

    def extend(self, sent_at: float) -> None:
        """Extend the trust after a successful renewal that was sent at *sent_at*."""
        interval = self.lock.interval
        if interval is not None and sent_at >= self.trusted_until:
            # The worker's main process has renewed it meanwhile.
            self.renewals += max(0, int((sent_at - self.renewed_at) / interval) - 1)
        counts_from = self._counted_at + (interval or 0.0) * (1 - EARLY_BY)
        if self._handed_on or sent_at >= counts_from:  # else it is a look for a newer task
            self.renewals += not self._handed_on
            self._handed_on, self._counted_at = False, sent_at
        self.due = None if interval is None else self._counted_at + interval
        self.renewed_at = sent_at
        self.trusted_until = sent_at + trust_in(self.lock.timeout)

    def lose(self, reason: str) -> None:
        """Mark the lease as lost, after it was unwatched."""
        self.end, self._reason = End.LOST, reason

    def spent(self, cost: int) -> bool:
        """
        Say what the start has really cost by the rates of its locks; one round trip, which blocks.

        What is more than the cost that was said before counts at once, also beyond the rate.  What
        is less does not count any more.  The units of a limit stay as they are.

        Args:
            cost: All that it has cost until now, >= 0.  The same number again changes nothing.

        Returns:
            False if the lease was lost or has ended; nothing was changed.

        Raises:
            SettingsError: No lock of this lease has a cost, or *cost* is no such number.
            StoreError: The server did not answer.  It may have been counted; say it again.
        """
        return not (self.finished or self.is_inherited) and self.lock.spent(self, cost)

    async def async_spent(self, cost: int) -> bool:
        """Do as :meth:`spent`, for coroutines: the event loop is not blocked."""
        return await run_on_loop(self.spent, cost)

    def release(self, ending: Ending = RELEASED) -> None:
        """
        End the lease; one round trip, or none if that was done before.

        On the server the lease lasts for ``lock_at_least_for`` seconds from its acquisition, or for
        as long as the ending says.  A lease that is left to expire is not renewed any more.

        If the server no longer has the lease, the lease is reported as lost.  If the server does
        not answer, no error is raised: the watchdog releases the lease when the server answers
        again, or the lease ends with its expiry.  The log says when.
        """
        if not self.finished and not self.is_inherited:
            self.lock.end(self, ending)

    def __bool__(self) -> bool:
        """Return True, also for a lost lease: only :class:`NoLease` is falsy; see :attr:`held`."""
        return True

    def __repr__(self) -> str:
        state = "held" if self._is_trusted else self.why_ended
        return f"<Lease of {self.key!r} by {self.owner}: {state}, token {self.token}>"


class NoLease(Lease):
    """
    The lease of a body that runs without a lock, such as one that is called as a function: falsy.

    It is not held, has the key "" and the token 0, which is smaller than that of any lease.  No
    lock was taken that could be lost, so :meth:`ensure_held` raises nothing.
    """

    def __init__(self) -> None:
        self.key = self.owner = ""
        self.holder = {}
        self.tokens = {}
        self.finished = True

    token = property(lambda _self: 0)
    acquired_at = property(lambda _self: 0.0)
    why_ended = property(lambda _self: "not locked")

    def confirm(self) -> bool:
        """Return False."""
        return False

    def ensure_held(self) -> None:
        """Do nothing: the body was run without its lock on purpose."""

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "<Lease: not locked>"


NOT_LOCKED = NoLease()


class Attempt:
    """
    One attempt of one owner to take a lock, and the lease if it succeeded.

    The lease is stored here before the watchdog starts to renew it.  The code that made the attempt
    can therefore always end the lease, even if an exception is raised at any instruction.

    Args:
        owner: The string that identifies this acquisition.
        holder: Description of the owner for others: task, id, worker, pid.
        sender: Sender of the signals about this lock.

    Attributes:
        reservation: The reservation of the task's message, which the acquisition begins, each
            renewal keeps and the release may end.  None: the message has none, or one beside
            another lock.
        lease: The lease; None as long as there is none.
        holder_json: The holder as a JSON object; empty: made here.
        how: How the lock was got, for metrics: "at_once", "waited", "parked" or "put_off".
        asked_at: Time of the first request, on this process's clock; None before it.
        waited: Seconds that the task has waited before *asked_at*: parked, or put off.
        trace: Any object that a watcher keeps with the attempt and its lease.
    """

    reservation: OwnReservation | None = None
    lease: Lease | None = None
    how = AT_ONCE
    asked_at: float | None = None
    waited = 0.0
    trace: Any = None

    def __init__(
        self, owner: str, holder: Mapping[str, Any], sender: object = None, holder_json: str = ""
    ) -> None:
        self.owner, self.holder, self.sender = owner, holder, sender
        self.holder_json = holder_json or write_holder(holder)

    def end(self) -> None:
        """Release the lease, if there is one; a second call does nothing."""
        if self.lease is not None:
            self.lease.release()


current: ContextVar[Attempt | None] = ContextVar("dislock_attempt", default=None)


def current_lease() -> Lease | None:
    """Return the lease of the running task body; None if it has no lease."""
    attempt = current.get()
    return attempt.lease if attempt is not None else None
