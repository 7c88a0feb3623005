"""Take a lock, wait in line for it, and have its lease kept alive."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from celery_dislock.config.censoring import checked
from celery_dislock.config.options import RENEWALS_PER_TIMEOUT
from celery_dislock.config.terms import LIMIT_MOST
from celery_dislock.config.values import number_from
from celery_dislock.exceptions import ForbiddenError, SettingsError, StoreError, UnreachableError
from celery_dislock.keys.templates import key_of
from celery_dislock.locks.lease import (
    ENDED_BY_OWNER,
    GONE_WHEN_RELEASED,
    GONE_WHEN_RENEWED,
    WAITED,
    Attempt,
    End,
    Lease,
    trust_in,
)
from celery_dislock.servers.connections import is_answer
from celery_dislock.servers.records import in_words, is_turn
from celery_dislock.servers.replies import TAKE_UP, FirstInLine, Granted, Replaced
from celery_dislock.servers.requests import RELEASED, LateRelease
from celery_dislock.signals import lock_acquired, lock_released

if TYPE_CHECKING:
    from collections.abc import Sequence

    from celery_dislock.config.options import TaskOptions
    from celery_dislock.locks.watchdog import Watchdog
    from celery_dislock.servers.records import Conflict
    from celery_dislock.servers.replies import Handed
    from celery_dislock.servers.requests import Ending
    from celery_dislock.servers.store import Store

ASK_AGAIN = 30.0  # seconds: the longest time between two requests of a waiter
PLACE_TIMEOUT = 3 * ASK_AGAIN  # seconds without a request after which a waiter counts as dead
# Seconds of the first and the longest pause after a wait that failed.  Shorter than TAKE_UP, or a
# hand-off would end before it is noticed.
UNHEARD = (0.1, 2.0)
UNSAID = 1  # failed waits in a row that are not logged: a connection may just have been closed
PAST_END = 0.002  # seconds to wait beyond a lease's end: the server counts in milliseconds

logger = logging.getLogger("celery_dislock")


def _in_one_text(keys: Sequence[str]) -> str:
    return " + ".join(keys)


class Lock:
    """
    The lock of one or several keys, with one set of options.

    Cheap to create: the state of an acquisition is in its lease.

    Args:
        keys: The keys.  All of several keys are taken, or none, in this order.  Every caller must
            use the same order.
        names: The names of the keys' locks in Redis.
        options: How the lock is taken and kept.
        store: The store of the lock server.
        watchdog: Renews the leases.
        fair: False: pass those in line if the lock admits one more lease.

    Attributes:
        key: The key, or all keys in one text, for messages.
        terms: The terms of each of its locks, or one for all of them.
        timeout: Seconds after which a lease expires unless it is renewed.
        interval: Seconds between two renewals; None: leases are not renewed.
        clock: Returns monotonic seconds: the watchdog's clock.
        channel: Is told what happens to the leases: the watchdog's channel.
    """

    def __init__(
        self,
        keys: Sequence[str],
        names: Sequence[str],
        options: TaskOptions,
        store: Store,
        watchdog: Watchdog,
        *,
        fair: bool = True,
    ) -> None:
        self.keys, self.names, self.options, self.store = keys, names, options, store
        self.key = keys[0] if len(keys) == 1 else _in_one_text(keys)
        self.watchdog, self.clock, self.channel = watchdog, watchdog.clock, watchdog.channel
        self.timeout, self.interval = options.timeout, options.renewal_interval
        self.fair, self.terms = fair, options.terms
        self._is_unheard = False  # whether the last release got no answer

    @property
    def asks(self) -> bool:
        """Whether the worker's main process may renew the leases."""
        return self.watchdog.asks

    def adopt_ticket_keys(self, names: Sequence[str]) -> None:
        """Become the lock of a ticket's keys; the code of the task may name other keys by now."""
        self.names, self.keys = names, [key_of(name) for name in names]
        self.key = _in_one_text(self.keys)

    def try_acquire(self, attempt: Attempt) -> Lease | Conflict:
        """
        Take the lock if it admits one more lease.  Never waits; one round trip.

        Args:
            attempt: The attempt.  If its owner already has the lock, the same lease is granted
                again.

        Returns:
            The lease, which the watchdog renews from now on, or the conflict.

        Raises:
            StoreError: The server did not answer.  The lock may have been taken.  If so, it ends
                after its timeout, or at once with :meth:`abandon`.
        """
        return self.acquire(attempt, timeout=0.0, place=0.0)

    def acquire(
        self,
        attempt: Attempt,
        *,
        timeout: float | None,
        gives_way: bool = False,
        place: float = PLACE_TIMEOUT,
    ) -> Lease | Conflict:
        """
        Take the lock, and wait in line for it, first come, first served.  Blocks.

        A release hands the lock to the first waiter in line and wakes only that waiter.  A waiter
        also asks the server again when the lease in its way should have expired, so it notices a
        crashed holder at that time.  It asks at least every ``ASK_AGAIN`` seconds to keep its
        place.

        A hand-off grants a lease of a few seconds.  The first renewal follows soon, and sets the
        full timeout.

        Args:
            attempt: The attempt.
            timeout: Maximum seconds to wait; None: no limit.
            gives_way: Return at once if the lock is reserved for a parked task: its message may
                need the slot in which the caller waits.
            place: Seconds without a request after which the attempt counts as dead, and its place
                in line is passed over; longer than *timeout* or ASK_AGAIN, whichever is less.

        Returns:
            The lease, or the conflict that remained after *timeout*.  After a conflict the attempt
            is no longer in line, unless it gives way: then it keeps its place for *place* seconds.

        Raises:
            StoreError: As for :meth:`try_acquire`.  The place in line is given up, or expires.
            ForbiddenError: The server's access rules forbid this user to wait in line.
        """
        # Errors that are raised at once: either nothing was asked for, or the caller itself gives
        # up what the attempt may have.
        passed_on: tuple[type[BaseException], ...]
        passed_on = (UnreachableError,) if place else (Replaced, StoreError)
        until = math.inf if timeout is None else self.clock() + timeout
        unheard = 0
        try:
            while True:
                asked_at = self.clock()
                attempt.asked_at = asked_at if attempt.asked_at is None else attempt.asked_at
                answer = self.store.acquire(
                    *(self.names, attempt.owner, self.timeout, attempt.holder_json),
                    terms=self.terms,
                    fair=self.fair,
                    place=place,
                    reservation=None if attempt.reservation is None else attempt.reservation.live,
                )
                if isinstance(answer, Granted):
                    return self.keep(attempt, answer.tokens, asked_at, self.timeout, begun=True)
                if not place:
                    return answer
                passed_on = ()
                attempt.how = WAITED
                if gives_way and is_turn(answer.holder):
                    return answer
                left = until - self.clock()
                if left <= 0:
                    self.abandon(attempt)
                    return answer
                try:
                    handed = self._wait(attempt, answer, left)
                    unheard = 0
                except StoreError as exc:
                    unheard += 1
                    self.watchdog.pause(self._rest(exc, unheard, left))
                    continue
                granted = self._granted(handed, attempt.asked_at or 0.0, place)
                if granted is not None:
                    return self.keep(attempt, *granted)
        except passed_on:
            raise
        except BaseException as exc:  # also a signal handler's exception, at any instruction
            refused = bool(passed_on) and isinstance(exc, StoreError) and is_answer(exc)
            self.interrupted(attempt, refused=refused)
            raise

    def _wait(self, attempt: Attempt, conflict: Conflict, left: float) -> Handed | None:
        """Wait in line; return a grant that can be used at once, or None: ask again."""
        pause = min(left, conflict.remaining + PAST_END, ASK_AGAIN)
        nth = self.keys.index(conflict.key)
        if nth:
            pause = min(pause, self.timeout / RENEWALS_PER_TIMEOUT)  # to keep the locks before it
        until = self.clock() + pause
        handed = self.store.wait(self.names[nth], attempt.owner, pause)
        while isinstance(handed, FirstInLine):
            # Another waiter was handed the lock.  If it is dead, its lease ends after TAKE_UP.
            pause = min(until - self.clock(), min(self.timeout, TAKE_UP) + PAST_END)
            if pause <= 0:
                return None
            handed = self.store.wait(self.names[nth], attempt.owner, pause)
        return handed

    def _granted(
        self, handed: Handed | None, asked_at: float, place: float
    ) -> tuple[tuple[int], float, float] | None:
        """Return token, time and expiry of a hand-off that can be used; None: ask again."""
        # Ask again for the other locks of several, and for the full length of a fixed expiry.
        if handed is None or len(self.names) > 1 or self.options.lock_expire is not None:
            return None
        # When the server granted the lock, it measured how long the place would still have lasted.
        # The place was set at the first request or later, to last for *place* seconds.  So the
        # grant is not older than *since*.  If a failover has lost later requests, *since* is long
        # ago, and the lock is asked for again.
        since = min(self.clock(), asked_at + place - handed.place_left)
        is_trusted = self.clock() < since + trust_in(handed.ttl)
        return ((handed.token,), since, handed.ttl) if is_trusted else None

    def _rest(self, error: StoreError, times: int, left: float) -> float:
        """Return the pause after a failed wait: the server refused to block, or did not answer."""
        if isinstance(error, ForbiddenError):  # asking again would not help
            raise error
        first, most = UNHEARD
        if times == UNSAID + 1:
            #: WARNING: A wait for a hand-off has failed twice; the task keeps its place in line,
            #: and polls. -> Follow the reason.
            logger.warning(
                "Lock %r: waiting to be woken failed; asking again every %g s at most: %s",
                *(self.key, most, error),
            )
        # If some of several locks are taken already, ask again in time to keep them.
        most = min(most, self.timeout / RENEWALS_PER_TIMEOUT)
        return min(first * 2.0 ** min(times - 1, 10), most, left)

    def keep(
        self,
        attempt: Attempt,
        tokens: Sequence[int],
        since: float,
        ttl: float,
        *,
        begun: bool = False,
    ) -> Lease:
        """
        Make the lease of an attempt that was granted, and have the watchdog renew it.

        Args:
            attempt: The attempt.
            tokens: The fencing token of each key.
            since: Time before the request was sent, on this process's clock.
            ttl: Seconds from *since* until the lease expires.
            begun: Whether the lock server was told of the task's reservation with the grant.

        Raises:
            StoreError: The grant came too late to be trusted.  The lock was released again, or ends
                with its expiry.
        """
        if begun and attempt.reservation is not None:
            attempt.reservation.begun()
        lease = Lease(self, attempt, dict(zip(self.keys, tokens, strict=True)), since, ttl)
        now = self.clock()
        if now >= lease.trusted_until:
            self.abandon(attempt)
            raise StoreError(self.store.server, "it granted a lock too late to be trusted")
        attempt.lease = lease
        self.watchdog.watch(lease)
        if self.channel.watched or lock_acquired.receivers:
            asked_at = since if attempt.asked_at is None else attempt.asked_at
            self.channel.acquired(lease, attempt.how, attempt.waited + now - asked_at)
        return lease

    def renew(self, lease: Lease) -> bool:
        """
        Renew a lease now; one round trip.

        Returns:
            False if the server no longer has the lease.  The lease is lost then.

        Raises:
            StoreError: The server did not answer.  The trust in the lease is unchanged.
        """
        sent_at = self.clock()
        [answer] = self.store.renew([(self.names, lease.owner, self.timeout)])
        if answer:
            lease.extend(sent_at)
            return True
        self.watchdog.unwatch(lease)
        if lease.end is None:
            lease.lose(GONE_WHEN_RENEWED)
            self.channel.lost(lease)
        return False

    def spent(self, lease: Lease, cost: int) -> bool:
        """
        Count what the lease's start has cost, at each lock with a cost.

        Returns:
            False if the server no longer has the lease.

        Raises:
            SettingsError, StoreError: See :meth:`Lease.spent`.
        """
        is_each = len(self.terms) == len(self.names)
        each = self.terms if is_each else [self.terms[0]] * len(self.names)
        counted = [pair for pair in zip(self.names, each, strict=True) if pair[1].cost is not None]
        if not counted:
            raise SettingsError(self.key, "spent", cost, "no key has a cost: give lock_cost")
        checked(self.key, "spent", number_from(0, LIMIT_MOST), cost)
        names, terms = zip(*counted, strict=True)
        return self.store.spent(names, lease.owner, cost, terms)

    def look_at(self, lease: Lease) -> None:
        """Ask the server soon whether a newer task waits for the lease to end; does not block."""
        self.watchdog.look_at(lease.holder.get("id"))

    def end(self, lease: Lease, ending: Ending) -> None:
        """
        End a lease; see :meth:`Lease.release`.  It can be repeated if it was interrupted.

        A lease that expires while its release is on its way is not lost, as it was held until its
        owner was done.  The release may be slow because another greenlet computes and keeps the hub
        from sending, or because a connection is made anew.
        """
        self.watchdog.unwatch(lease)
        # An earlier call may have been interrupted by an exception after it had sent the release.
        sent_before = lease.end in ENDED_BY_OWNER
        if lease.end is None:
            lease.end = End.EXPIRING if ending.expires else End.RELEASED
        trusted = lease.trusted_until > self.clock()
        if ending.expires or self.options.lock_at_least_for:
            ending = self._dated(lease, ending, trusted=trusted)
        done = sent_before  # if it is interrupted again, the watchdog does the rest
        try:
            was_held = self.store.release(self.names, lease.owner, ending) or sent_before
            if sent_before:
                self.watchdog.cleared(lease.owner)
            if not (was_held or (trusted and lease.trusted_until <= self.clock())):
                self._gone(lease, ending)
            done = True
        except StoreError as exc:
            self.release_late(lease.owner, ending)
            #: WARNING: The lock server went away at the end of a task; the lock is released within
            #: seconds of its return.
            logger.warning(
                "Lock %r of %s could not be released and ends by itself within %.1f s, or when the "
                "lock server answers again: %s",
                *(self.key, in_words(lease.holder), self.timeout, exc),
            )
            if not trusted:
                self._gone(lease, ending)
            done = True
        except BaseException:  # an interruption; the caller may not come to repeat this call
            self.release_late(lease.owner, ending)
            raise
        finally:
            if done:
                lease.finished = True
                if self.channel.watched or lock_released.receivers:
                    self.channel.released(lease, expiring=ending.expires)

    def _dated(self, lease: Lease, ending: Ending, *, trusted: bool) -> Ending:
        """Return the ending of a lease that lasts for some time, with that time."""
        at_least = max(ending.at_least, self.options.lock_at_least_for)
        if ending.expires:
            # The main process of the worker may have renewed the lease until now.
            renewed_at = self.clock() if self.asks and not trusted else lease.renewed_at
            # The brackets keep rounding errors from adding a millisecond.
            at_least = max(at_least, self.timeout + (renewed_at - lease.since))
        return ending._replace(at_least=at_least)

    def _gone(self, lease: Lease, ending: Ending) -> None:
        """Mark a lease as lost that was gone when it should have been held, and report the loss."""
        if ending.expires or lease.lost:
            return
        if lease.capped:  # the cap was reported before
            lease.lose(f"it was renewed {lease.renewals} times, its cap, and ran out")
        else:
            lease.lose(GONE_WHEN_RELEASED)
            self.channel.lost(lease)

    def interrupted(self, attempt: Attempt, *, refused: bool = False) -> None:
        """
        Give up an attempt that an exception has interrupted, unless it has a lease.

        If a second exception interrupts this call, or the server does not answer, the watchdog
        gives the attempt up.

        Args:
            attempt: The attempt.
            refused: See :meth:`abandon`.
        """
        if attempt.lease is None:
            self.release_late(attempt.owner)
            if self.abandon(attempt, refused=refused):
                self.watchdog.cleared(attempt.owner)

    def release_late(self, owner: str, ending: Ending = RELEASED) -> None:
        """Have the watchdog release what an owner that is done has or may have; does not block.

        The owner must not ask for a lock again.
        """
        self.watchdog.clear(LateRelease(self.names, owner, ending), timeout=self.timeout)

    def abandon(self, attempt: Attempt, *, refused: bool = False) -> bool:
        """
        Give up an attempt that was not granted in time: its place in line and its leases.

        Args:
            attempt: The attempt.
            refused: The server answered the attempt's first request with an error, so it has
                granted nothing.

        Returns:
            Whether the server answered.
        """
        try:
            self.store.release(self.names, attempt.owner)
        except StoreError as exc:
            self.release_late(attempt.owner)
            # A beat that stands by tries again each second, for as long as the server refuses.
            if refused:
                return False
            level = logging.DEBUG if self._is_unheard else logging.WARNING
            self._is_unheard = True
            #: WARNING: Somebody stopped waiting while the lock server was away; the lock may be
            #: granted to it, and expires.
            logger.log(
                level,
                "Lock %r may stay taken for up to %.1f s with no live holder, since %s gave it up "
                "and could not release it: %s",
                *(self.key, self.timeout, in_words(attempt.holder), exc),
            )
            return False
        self._is_unheard = False
        return True
