"""The watchdog of one process keeps its leases alive, and says so when one is lost.

**Renewals.**  A lease that is due is renewed together with others that are due soon after, in one
pipelined round trip.  If more are due than one batch has room for, as after an outage, those whose
trust ends first come first.  A failed batch is retried soon, with backoff, as long as its
leases are trusted.  The batches after it do not wait for the retry.  If a thread, greenlet or
asyncio task that took a lease has ended, the lease is no longer renewed: nothing would release it.

**Stalls.**  At its deadline a lease is lost.  The exception is a pool process that did not run: it
was stopped, or a body held the GIL.  The worker's main process then renews the leases of that
process.  So if the trust in a lease has ended meanwhile, the server is asked before the lease is
called lost.  A renewal succeeds only if the lease has never expired, and then nobody else was let
in.

**Late releases.**  If the server did not answer a release, or an exception interrupted an attempt
to take a lock, the watchdog ends the leases and places in line of that owner.  Otherwise a process
that hangs after the body, in a result backend that is away, would keep its lock: the worker's main
process renews it.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from celery_dislock.clock import FOREVER, monotonic
from celery_dislock.exceptions import DamagedLockError, StoreError
from celery_dislock.locks.channel import Channel
from celery_dislock.locks.lease import EARLY_BY, GONE_WHEN_RENEWED, End
from celery_dislock.locks.loop import Loop
from celery_dislock.servers.bridge import sleep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from celery_dislock.locks.lease import Lease
    from celery_dislock.servers.requests import LateRelease
    from celery_dislock.servers.store import Store

    Report = Callable[[Lease], None]

BATCH = 500  # leases in one round trip: about 5 ms of work for the server
RETRY_FIRST = 0.1  # seconds from the second try to the third; doubled each time
RETRY_MOST = 1.0  # maximum seconds until a retry
WITHIN_LEAST = 0.05  # minimum seconds to wait for the server's reply
WITHIN_MOST = 1.0  # maximum seconds to wait for the server's reply
WITHIN_OTHERS = 0.5  # maximum seconds to wait for the reply to anything but renewals
CLEAR_EVERY = 1.0  # seconds between two tries to release late
CLEAR_FOR = 90.0  # seconds of retries to release an interrupted attempt; its place expires by then
FLUSH_WITHIN = 1.0  # maximum seconds for which the end of a process or an event loop is held up
FLUSH_POLL = 0.005  # seconds between two looks whether all was sent

logger = logging.getLogger("celery_dislock")


class Watchdog(Loop):
    """
    Keeps the leases of one process alive, and releases what could not be released.

    ``len()`` is the number of leases that are renewed, and iteration gives them.

    Args:
        store: Sends the renewals and late releases.
        clock: Returns monotonic seconds.
        threaded: See :class:`Loop`.
        beside_greenlets: The store belongs to the thread alone, and reports are made in a greenlet.
        asks: Ask the server about a lease whose trust has ended while this process did not run,
            because the worker's main process may have renewed it.
        channel: Is told of the leases; its watchers do their work in the thread.  None: a new one.

    Attributes:
        asks: The argument of that name.
        failures: Batches of renewals that have failed in a row.
        uncleared: Late releases by owner, each with the time after which it is not retried.
        channel: The argument of that name.
        pause: Called with the seconds to sleep, by a lock whose waiting in line has failed.
    """

    pause: Callable[[float], None] = staticmethod(sleep)

    def __init__(
        self,
        store: Store,
        *,
        clock: Callable[[], float] = monotonic,
        threaded: bool = True,
        beside_greenlets: bool = False,
        asks: bool = False,
        channel: Channel | None = None,
    ) -> None:
        self._store = store
        self.asks = asks
        self.failures = 0
        self._clears_at = 0.0
        super().__init__(clock=clock, threaded=threaded, beside_greenlets=beside_greenlets)
        self.channel = channel or Channel()
        self.channel.wake = self._wake_for_work
        # While renewals fail, the thread has no time to spare, and the watchers wait.
        self.steps = (
            (self._renewal_due, self._renew_due),
            (self._clearing_due, self._clear),
            (self._work_due, self._work),
        )

    def begin(self) -> None:
        """Begin, here or in a forked child, which renews no lease of its parent."""
        super().begin()
        # Lease -> until when the server is asked about it after a stall; 0.0: there was no stall.
        self._leases: dict[Lease, float] = {}
        self.uncleared: dict[str, tuple[LateRelease, float]] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.copy())

    def watch(self, lease: Lease) -> None:
        """Renew this lease from now on; does not block."""
        self._leases[lease] = 0.0
        due = lease.due or lease.trusted_until
        if due < self.wakes_at:  # otherwise the thread runs, and wakes in time
            self.wake(due)

    def look_at(self, task_id: object) -> None:
        """Ask the server soon whether a newer task waits for this one; does not block."""
        for lease in self:
            if lease.holder.get("id") == task_id and lease.due is not None:
                lease.due = self.clock()
                self.wake(lease.due)

    def unwatch(self, lease: Lease) -> None:
        """
        Stop renewing this lease; does not block.

        A renewal in progress may still reach the server before the release does.  Its reply is
        ignored.
        """
        with self._mutex:  # so that either the owner or the watchdog ends the lease
            self._leases.pop(lease, None)

    def clear(self, late: LateRelease, *, timeout: float = 0.0) -> None:
        """
        Release soon the leases and places in line of an owner that is done; does not block.

        The release is retried until the server answers or :meth:`cleared` is called.  Leases and
        places end by themselves, so their release is retried for *timeout* or ``CLEAR_FOR``
        seconds at most; that of a ticket without a limit.  An owner that is done must not ask for
        a lock again.

        Args:
            late: The release.
            timeout: Seconds after which the owner's leases have ended by themselves.
        """
        now = self.clock()
        if not self.uncleared:
            self._clears_at = now + CLEAR_EVERY
        until = FOREVER if late.ending.ticket else now + max(CLEAR_FOR, timeout)
        self.uncleared[late.owner] = late, until
        self.wake(self._clears_at)

    def cleared(self, owner: str) -> None:
        """Forget an owner that no longer holds or waits for a lock."""
        self.uncleared.pop(owner, None)

    def hurry(self) -> None:
        """Send at once the releases that wait."""
        if self.uncleared:
            self._clears_at = self.clock()
            self.wake(self._clears_at)

    def flush(self, within: float = FLUSH_WITHIN) -> None:
        """Have the releases that wait sent at once; blocks for *within* seconds at most."""
        until = time.monotonic() + within
        with suppress(RuntimeError):  # no thread can be started any more
            self.hurry()
        while self.uncleared and time.monotonic() < until:
            time.sleep(FLUSH_POLL)

    def ended(self) -> None:
        """Send the releases that wait, and close the connections of this thread's hub."""
        if self.uncleared:
            self._clear(self.clock())
        if self._beside_greenlets:
            self._store.close()

    def stalled(self, since: float, now: float) -> None:
        """Have the server asked about the leases whose trust has ended during the stall."""
        with self._mutex:
            for lease in self if self.asks else ():
                if lease.due is not None and since < self._lost_at(lease) <= now:
                    # The main process may have renewed the lease just now, for a whole timeout.
                    self._leases[lease] = now + lease.lock.timeout

    def _lost_at(self, lease: Lease) -> float:
        return max(lease.trusted_until, self._leases.get(lease, 0.0))

    def _renewal_due(self) -> float:
        return min((lease.due or lease.trusted_until for lease in self), default=FOREVER)

    def _renew_due(self, now: float) -> None:
        """Report the leases that are over, and renew the most urgent ones that are due."""
        due = [
            lease
            for lease in self
            if (lease.due or lease.trusted_until) - (lease.lock.interval or 0.0) * EARLY_BY <= now
        ]
        batch: list[Lease] = []
        reports: list[tuple[Report | None, Lease]] = []
        for lease in sorted(due, key=self._lost_at):
            with self._mutex:
                if lease not in self._leases:
                    continue
                report = self._over(lease, now)
                if report is None:
                    batch.append(lease)
                else:
                    del self._leases[lease]
                    reports.append((report, lease))
            if len(batch) == BATCH:
                break
        self._make(reports)
        if batch:
            self._renew(batch)

    def _over(self, lease: Lease, now: float) -> Report | None:
        """Mark a lease whose renewals end, and return the report of that; None: it is renewed."""
        options = lease.lock.options
        if self._lost_at(lease) <= now:
            lease.lose(
                "it could not be renewed in time"
                if options.lock_expire is None
                else f"its fixed expiry of {options.lock_expire:g} s ran out"
            )
            return self.channel.lost
        if lease.caller_ended is not None and lease.caller_ended():
            lease.end = End.ABANDONED
            return self.channel.abandoned
        if lease.due is not None and 0 < options.max_renew_times <= lease.renewals:
            lease.capped = True
            return self.channel.capped
        return None

    def _renew(self, batch: Sequence[Lease]) -> None:
        sent_at = self.clock()
        within = max(WITHIN_LEAST, min((self._lost_at(batch[0]) - sent_at) / 2, WITHIN_MOST))
        leases = [(lease.lock.names, lease.owner, lease.lock.timeout) for lease in batch]
        renew = partial(self._store.renew, leases, within=within)
        answers = self.ask("renewing leases", within, renew, len(batch))
        self._report_outage([answer for answer in answers if isinstance(answer, StoreError)])
        # All answers are applied before the first report, which may take long.
        reports = [
            (self._answered(lease, answer, sent_at), lease)
            for lease, answer in zip(batch, answers, strict=True)
        ]
        kept = [
            reserved
            for lease, answer in zip(batch, answers, strict=True)
            if not isinstance(answer, StoreError) and answer and lease.reservation is not None
            if (reserved := lease.reservation.renewed) is not None
        ]
        if kept:  # if this fails it is not retried: the next renewals keep the reservations, too
            keep = partial(self._store.reservations.keep, kept, runs=True, within=within)
            self.ask("keeping reservations", within, keep)
        self._make(reports)

    def _answered(
        self,
        lease: Lease,
        answer: bool | str | StoreError,  # noqa: FBT001 -- as the store gives it
        sent_at: float,
    ) -> Report | None:
        """
        Apply the server's answer about a lease, and return the report to make.

        Args:
            lease: The lease.
            answer: What :meth:`Store.renew` returned for it.
            sent_at: Time before the renewal was sent.
        """
        with self._mutex:
            if lease not in self._leases:  # its owner has ended it meanwhile
                return None
            if isinstance(answer, StoreError):
                lease.due = self._retry_at(lease, sent_at)
                return None
            if not answer:
                del self._leases[lease]
                lease.lose(GONE_WHEN_RENEWED)
                return self.channel.lost
            lease.extend(sent_at)
            if isinstance(answer, str) and (action := self._due_action(lease, answer)):
                return partial(self.channel.superseded, action)
            if answer is True and lease.told_at is None:
                lease.superseded = ""  # who came has left the line
            return self.channel.renewed

    def _due_action(self, lease: Lease, by: str) -> str | None:
        """Return the action to apply now to a body that a newer task waits for; None: nothing.

        If an action is due later, the lease is renewed at that time, which calls this again.
        """
        options, now = lease.lock.options, self.clock()
        if options.on_cancel is None:
            lease.superseded = by
            return None
        if lease.told_at is None:
            action, at = options.on_cancel, lease.since + options.lock_cancel_not_before
        elif options.lock_cancel_after is not None and not lease.terminated:
            action, at = "terminate", lease.told_at + options.lock_cancel_after
        else:
            return None
        interval = lease.lock.interval or 0.0
        if now < at - interval * EARLY_BY:
            lease.due = min(lease.due or at, at)
            return None
        if lease.told_at is not None:
            lease.terminated = True
            return action
        lease.superseded, lease.told_at = by, now
        if options.lock_cancel_after is not None:
            lease.due = min(lease.due or FOREVER, now + options.lock_cancel_after)
        return action

    def _retry_at(self, lease: Lease, sent_at: float) -> float:
        """Return when to try again; the time that the last try took counts as part of the pause."""
        now, lost_at = self.clock(), self._lost_at(lease)
        if lost_at - now <= WITHIN_LEAST:
            return lost_at
        pause = 0.0
        if self.failures > 1:  # the first time, an idle connection may have been cut
            pause = min(RETRY_FIRST * 2 ** min(self.failures - 2, 10), RETRY_MOST)
        return max(now, min(sent_at + pause, now + (lost_at - now) / 4))

    def _report_outage(self, errors: Sequence[StoreError]) -> None:
        if errors:
            self.failures += 1
            if self.failures == 1:
                #: WARNING: The lock server is away; leases last for the rest of their timeout; once
                #: per process and outage. -> Check the lock server.
                message = "Cannot renew %d lock(s), trying again: %s"
                self.report(logger.warning, message, len(errors), errors[0])
        elif self.failures:
            #: INFO: The outage is over for leases that were not lost.
            message = "Locks are renewed again, after %d failed tries."
            self.report(logger.info, message, self.failures)
            self.failures = 0

    def _make(self, reports: Sequence[tuple[Report | None, Lease]]) -> None:
        for report, lease in reports:
            if report is not None:
                self.report(report, lease)

    def _clearing_due(self) -> float:
        return self._clears_at if self.uncleared else FOREVER

    def _clear(self, now: float) -> None:
        """Send one batch of late releases."""
        self._clears_at = now + CLEAR_EVERY
        waiting = self.uncleared.copy()
        batch = list(islice(waiting.values(), BATCH))
        releases = [late for late, _ in batch]
        clear = partial(self._store.clear, releases, within=WITHIN_OTHERS)
        errors = self.ask("releasing leases", WITHIN_OTHERS, clear, len(batch))
        now = self.clock()
        for (late, until), error in zip(batch, errors, strict=True):
            unanswered = error is not None and not isinstance(error, DamagedLockError)
            if self.uncleared.pop(late.owner, None) is not None and unanswered and now <= until:
                self.uncleared[late.owner] = late, until  # behind the others
        if len(waiting) > len(batch) and not any(errors):
            self.hurry()

    def _wake_for_work(self) -> None:
        due = self._work_due()
        if due < self.wakes_at:
            self.wake(due)

    def _work_due(self) -> float:
        return FOREVER if self.failures and self._leases else self.channel.due_at()

    def _work(self, now: float) -> None:  # noqa: ARG002 -- a step
        self.ask("running telemetry", WITHIN_OTHERS, self.channel.run)
