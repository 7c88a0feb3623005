"""Renew the leases of this process, and report those that are lost.

When a lease is due, it is renewed together with others that are due soon after, in one pipelined
round trip on a dedicated connection of the store.  If more are due than one batch has room for, as
after an outage, those in which the trust ends first come first.

A failed batch is retried soon, with backoff, as long as its leases are trusted.  The batches after
it do not wait for the retry.

If a thread, greenlet or asyncio task that took a lease has ended, its lease is no longer renewed,
because nothing else would release it.

A pool process may be stalled: it was stopped, or a body held the GIL.  The worker's main process
then renews its leases.  So if the trust in a lease has ended while this process did not run, the
server is asked before the lease is called lost.  A renewal succeeds only if the lease has never
expired, and then nobody else was let in.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from celery_dislock.clock import FOREVER
from celery_dislock.exceptions import StoreError
from celery_dislock.locks.lease import GONE_WHEN_RENEWED, End
from celery_dislock.locks.loop import WITHIN_MOST
from celery_dislock.locks.native import reentrant_lock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from celery_dislock.locks.channel import Channel
    from celery_dislock.locks.lease import Lease
    from celery_dislock.locks.loop import Loop
    from celery_dislock.servers.reservations import Reservation
    from celery_dislock.servers.store import Store

    Report = Callable[[Lease], None]

BATCH = 500  # renewals in one round trip: about 5 ms of work for the server
EARLY = 1 / 20  # fraction of the renewal interval by which a renewal may be early to join a batch
RETRY_FIRST = 0.1  # seconds from the second try to the third; doubled each time
RETRY_MOST = 1.0  # maximum seconds until a retry
WITHIN_LEAST = 0.05  # minimum seconds to wait for the server's reply

logger = logging.getLogger("celery_dislock")


class Renewals:
    """
    The job that renews leases.

    Args:
        loop: The loop that runs it.
        store: Sends the renewals.
        channel: Is told what happens to the leases.
        asks: Ask the server about a lease in which the trust has ended while this process was
            stalled, because another process may have renewed it.

    Attributes:
        asks: The argument of that name.
        failures: Batches that have failed in a row.
    """

    def __init__(self, loop: Loop, store: Store, channel: Channel, *, asks: bool = False) -> None:
        self.asks = asks
        self.failures = 0
        self._loop = loop
        self._store = store
        self._channel = channel
        self._due: dict[Lease, float] = {}  # time of the next action on each lease
        # A lease that the owner ends and the server no longer has is reported by one of both.
        self._mutex = reentrant_lock()
        loop.on_stall = self._stalled

    def __len__(self) -> int:
        """Return the number of watched leases."""
        return len(self._due)

    def __iter__(self) -> Iterator[Lease]:
        """Return the watched leases."""
        return iter(self._due.copy())

    def watch(self, lease: Lease) -> None:
        """Renew this lease from now on; does not block."""
        self._due[lease] = when = lease.trusted_until if lease.due is None else lease.due
        self._loop.wake(when)

    def unwatch(self, lease: Lease) -> None:
        """
        Stop renewing this lease; does not block.

        A renewal in progress may still reach the server before the release does.  Its reply is
        ignored.
        """
        with self._mutex:
            self._due.pop(lease, None)

    def due_at(self) -> float:
        """Return the time of the next action on a lease."""
        return min(self._due.copy().values(), default=FOREVER)

    def run(self, now: float) -> None:
        """Renew the most urgent leases that are due, one batch in one round trip."""
        due = [
            lease
            for lease, when in self._due.copy().items()
            if when - (lease.driver.interval or 0.0) * EARLY <= now
        ]
        due.sort(key=lambda lease: lease.kept_until)
        batch: list[Lease] = []
        reports: list[tuple[Report, Lease]] = []
        for lease in due:
            with self._mutex:
                if lease not in self._due:
                    continue
                report = self._over_with(lease, now)
                if report is not None:
                    self._due.pop(lease, None)
                    reports.append((report, lease))
                elif lease.due is None:
                    self._due[lease] = lease.trusted_until
                else:
                    batch.append(lease)
            if len(batch) == BATCH:
                break
        for report, lease in reports:
            self._loop.report(report, lease)
        if batch:
            self._renew(batch)

    def _over_with(self, lease: Lease, now: float) -> Report | None:
        """Return the report to make if the lease is no longer renewed; None if it goes on."""
        if lease.kept_until <= now:
            expiry = lease.driver.options.lock_expire
            lease.lose(
                "it could not be renewed in time"
                if expiry is None
                else f"its fixed expiry of {expiry:g} s ran out"
            )
            return self._channel.lost
        if lease.caller_ended is not None and lease.caller_ended():
            lease.end = End.ABANDONED
            return self._channel.abandoned
        if lease.due is not None and 0 < lease.driver.options.max_renew_times <= lease.renewals:
            lease.capped = True
            return self._channel.capped
        return None

    def _renew(self, batch: list[Lease]) -> None:
        sent_at = self._loop.clock()
        within = max(WITHIN_LEAST, min((batch[0].kept_until - sent_at) / 2, WITHIN_MOST))
        leases = [(one.driver.names, one.owner, one.driver.timeout) for one in batch]
        answer = self._loop.ask(
            "renewing leases", within, lambda: self._store.renew(leases, within=within)
        )
        answers: Sequence[bool | StoreError]
        answers = [answer] * len(batch) if isinstance(answer, StoreError) else answer
        self._report_outage([answer for answer in answers if isinstance(answer, StoreError)])
        # All answers are applied before the first report, which may take long.
        reports = [self._answered(*one, sent_at) for one in zip(batch, answers, strict=True)]
        renewed = [lease for lease, answer in zip(batch, answers, strict=True) if answer is True]
        self._keep([one.reservation for one in renewed if one.reservation is not None], within)
        for report, lease in zip(reports, batch, strict=True):
            if report is not None:
                self._loop.report(report, lease)

    def _keep(self, reservations: list[Reservation], within: float) -> None:
        """Keep the reservations of tasks that run; one that is missed costs no more than itself."""
        running = [one for one in reservations if one.until == "end"]
        if running:
            keep = partial(self._store.reservations.keep, running, runs=True, within=within)
            self._loop.ask("keeping reservations", within, keep)

    def _answered(
        self,
        lease: Lease,
        answer: bool | StoreError,  # noqa: FBT001 -- as the store gives it
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
            if lease not in self._due:  # its owner has ended it meanwhile
                return None
            if isinstance(answer, StoreError):
                self._due[lease] = self._retry_at(lease, sent_at)
                return None
            if not answer:
                del self._due[lease]
                lease.lose(GONE_WHEN_RENEWED)
                return self._channel.lost
            lease.extend(sent_at)
            self._due[lease] = lease.trusted_until if lease.due is None else lease.due
            return self._channel.renewed

    def _retry_at(self, lease: Lease, sent_at: float) -> float:
        """Return when to try again; the time that the try has waited for a reply is pause, too."""
        now = self._loop.clock()
        left, pause = lease.kept_until - now, 0.0
        if self.failures > 1:  # at first the connection may have been cut while nobody used it
            pause = min(RETRY_FIRST * 2 ** min(self.failures - 2, 10), RETRY_MOST)
        if left <= WITHIN_LEAST:
            return lease.kept_until
        return max(now, min(sent_at + pause, now + left / 4))

    def _report_outage(self, errors: list[StoreError]) -> None:
        if errors:
            self.failures += 1
            if self.failures == 1:
                message = "Cannot renew %d lock(s), trying again: %s"
                self._loop.report(logger.warning, message, len(errors), errors[0])
        elif self.failures:
            message = "Locks are renewed again, after %d failed tries."
            self._loop.report(logger.info, message, self.failures)
            self.failures = 0

    def _stalled(self, since: float, now: float) -> None:
        """Keep asking the server about leases that it could not ask about in time, for a stall."""
        for lease in list(self._due.copy()) if self.asks else ():
            interval = lease.driver.interval
            if interval is not None and since < lease.kept_until <= now:
                # It may have been renewed a moment ago, and lasts for a timeout then.
                lease.asked_until = now + lease.driver.timeout
