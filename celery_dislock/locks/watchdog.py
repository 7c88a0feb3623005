"""Keep held leases alive, and say so when one is lost.

One loop per process renews every lease of that process.  It sleeps until the nearest renewal is
due, takes along those that are due soon after, and renews them in one pipelined round trip, on a
connection of the store's own for it.

Two heaps hold the leases.  *Timers* orders them by when they want attention; *due* orders those
whose renewal is due by when trust in them ends, so that after an outage the most urgent come first.
A lease moves from timers to due, and back when it is renewed.  Taking one out is a number set to
zero: an entry whose number is not its lease's any more is dropped when it comes up.

A lease that a thread or greenlet took in plain Python is not renewed when that one has ended: no
one is left to release it.  Beside the leases the loop keeps a list of owners that were cut short by
an exception while they asked for a lock.  What they hold or wait for is released in batches, too.

After each batch the loop looks at its clock again.  A batch that fails is tried again soon, with
backoff, within the trust that is left; the batches behind it are not made to wait for that.
"""

from __future__ import annotations

import logging
import threading
import time
from heapq import heapify, heappop, heappush
from itertools import count, islice
from typing import TYPE_CHECKING, NamedTuple

from celery_dislock import signals
from celery_dislock.exceptions import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from celery_dislock.locks.lease import Lease
    from celery_dislock.servers.store import Store

BATCH = 500  # renewals in one round trip: some 5 ms of work for the server
EARLY = 1 / 20  # of the time between two renewals: so much earlier a lease may be taken along
RETRY_FIRST = 0.1  # seconds until a failed renewal is tried again; doubled each time
RETRY_MOST = 1.0  # seconds between two tries at most
WITHIN_MOST = 1.0  # seconds to wait for the server's answer
WITHIN_LEAST = 0.05
SURVIVED = (Exception, SystemExit)  # a signal receiver may raise either
CLEAR_FOR = 90.0  # seconds; then an owner's place in line and its lease have run out, too
DEAD_ENTRIES = 1000  # heap entries of ended leases that are worth a clean-up

logger = logging.getLogger("celery_dislock")


class Entry(NamedTuple):
    """A lease in one of the heaps; *number* breaks ties and tells a stale entry."""

    when: float
    number: int
    lease: Lease


class Over(NamedTuple):
    """An owner that is over, and may hold or wait for locks all the same."""

    names: Sequence[str]
    until: float  # then they have run out


class Watchdog:
    """The leases of this process.

    The thread (a greenlet, under gevent and eventlet) starts with the first lease, and does not
    outlive the process.

    Args:
        store: Renews leases.
        clock: Monotonic seconds.
        threaded: False: no thread is started, and the caller calls :meth:`tick`.

    Attributes:
        errors: Unexpected exceptions that the loop has survived.
    """

    def __init__(
        self,
        store: Store,
        *,
        clock: Callable[[], float] = time.monotonic,
        threaded: bool = True,
    ) -> None:
        self.errors = 0
        self._store = store
        self._clock = clock
        self._threaded = threaded
        self._thread: threading.Thread | None = None
        self._loop: object = None  # the one that is to run; any other ends
        # Entered once more by its thread if a signal handler, or a generator that the interpreter
        # closes, takes or releases a lock in the middle of a step.
        self._mutex = threading.RLock()
        self._wake = threading.Condition(self._mutex)
        self._wakes_at = 0.0
        self._numbers = count(1)
        self._latest = 0  # of them
        self._timers: list[Entry] = []
        self._due: list[Entry] = []
        self._watched: set[Lease] = set()
        self._over: dict[str, Over] = {}  # by owner
        self._clear_at = 0.0
        self._failures = 0  # in a row

    def __len__(self) -> int:
        """Count the leases that are watched."""
        return len(self._watched)

    def watch(self, lease: Lease) -> None:
        """Renew the lease from now on; does not block."""
        with self._mutex:
            self._watched.add(lease)
            when = self._schedule(lease)
            if when < self._wakes_at:
                self._wake.notify()
        self._ensure_running()

    def unwatch(self, lease: Lease) -> None:
        """
        Leave the lease alone from now on; does not block.

        A renewal that is under way may still reach the server before the release does; its answer
        is ignored.
        """
        with self._mutex:
            self._drop(lease)
            watched = len(self._watched)
            dead = len(self._timers) + len(self._due) - watched
            if dead > DEAD_ENTRIES and dead > watched:
                self._clean_up()

    def _clean_up(self) -> None:
        latest = self._latest
        kept = [entry for entry in self._timers.copy() if _valid(entry)]
        heapify(kept)
        if self._latest == latest:  # else this thread has added one meanwhile; the next will do
            self._timers = kept

    def clear(self, names: Sequence[str], owner: str) -> None:
        """
        Release soon what an owner may hold or wait for that is over; does not block.

        It is tried until the server answers, or all of it has run out, or :meth:`cleared` is
        called.

        Args:
            names: Of the locks in Redis.
            owner: Who asked for them.
        """
        now = self._clock()
        if not self._over:
            self._clear_at = now + RETRY_MOST
        self._over[owner] = Over(names, now + CLEAR_FOR)
        with self._mutex:
            self._wake.notify()
        self._ensure_running()

    def cleared(self, owner: str) -> None:
        """Note that an owner neither holds nor waits for anything any more."""
        self._over.pop(owner, None)

    def start(self) -> None:
        """Start the loop, if it does not run."""
        with self._mutex:
            if self._thread is not None and self._thread.is_alive():
                return
            # A start that an exception cuts short leaves a thread that finds its loop replaced.
            self._loop = loop = object()
            thread = self._thread = threading.Thread(
                target=self._run, args=(loop,), name="dislock-watchdog", daemon=True
            )
            thread.start()

    def stop(self) -> None:
        """
        End the loop; blocks until it has ended, which takes as long as a round trip at most.

        Leases that are watched are renewed no more.  The next one starts the loop again.
        """
        with self._mutex:
            thread, self._thread, self._loop = self._thread, None, None
            self._wake.notify()
        if thread is not None and thread is not threading.current_thread() and thread.is_alive():
            thread.join(WITHIN_MOST * 2)

    def _ensure_running(self) -> None:
        if self._threaded and (self._thread is None or not self._thread.is_alive()):
            self.start()

    def tick(self) -> float | None:
        """
        Do what is due: at most one round trip.

        Returns:
            Seconds until there may be more to do, 0 for at once, None when there is nothing.
        """
        now = self._clock()
        reports: list[Callable[[], None]] = []
        batch: list[Entry] = []
        with self._mutex:
            self._collect_due(now)
            while self._due and len(batch) < BATCH:
                entry = heappop(self._due)
                if not _valid(entry):
                    continue
                report = self._over_with(entry.lease, now)
                if report is not None:
                    self._drop(entry.lease)
                    reports.append(report)
                elif entry.lease.lock.interval is None:
                    self._put(entry.lease, entry.lease.trusted_until)
                else:
                    batch.append(entry)
        try:
            for report in reports:
                self._report(report)
        finally:
            if batch:
                self._renew(batch)
        if self._over and self._clear_at <= self._clock():
            self._clear()
        with self._mutex:
            return self._idle_for()

    def _over_with(self, lease: Lease, now: float) -> Callable[[], None] | None:
        """Return what reports that a lease is renewed no more; None: it is to be renewed."""
        if lease.trusted_until <= now:
            lease.lose(_why_expired(lease))
            return lease.report_lost
        if lease.abandoned:
            return lease.report_abandoned
        if lease.lock.interval is not None and _at_cap(lease):
            return lease.report_capped
        return None

    def _collect_due(self, now: float) -> None:
        while self._timers:
            first = self._timers[0]
            if first.when - (first.lease.lock.interval or 0.0) * EARLY > now:
                break
            entry = heappop(self._timers)
            if _valid(entry):
                heappush(self._due, Entry(entry.lease.trusted_until, entry.number, entry.lease))

    def _idle_for(self) -> float | None:
        if self._due:
            return 0.0
        if not self._timers and not self._over:
            self._wakes_at = float("inf")
            return None
        # The first entry may be stale, and the loop wake once for nothing.  To look past it would
        # cost more: where short leases follow one another, each of them would have to wake it.
        self._wakes_at = self._timers[0].when if self._timers else self._clear_at
        if self._over:
            self._wakes_at = min(self._wakes_at, self._clear_at)
        return max(0.0, self._wakes_at - self._clock())

    def _clear(self) -> None:
        """Release what owners hold or wait for that are over, as many as go in one round trip."""
        self._clear_at = self._clock() + RETRY_MOST
        batch = list(islice(self._over.copy().items(), BATCH))
        try:
            self._store.clear([(one.names, owner) for owner, one in batch], within=WITHIN_MOST / 2)
            over = batch
        except SURVIVED as exc:
            over = [(owner, one) for owner, one in batch if one.until < self._clock()]
            if not isinstance(exc, StoreError):
                self._survive("releasing what was cut short", exc)
        for owner, _ in over:
            self.cleared(owner)

    def _renew(self, batch: list[Entry]) -> None:
        sent_at = self._clock()
        urgency = (batch[0].when - sent_at) / 2
        answers: Sequence[bool | StoreError]
        try:
            answers = self._store.renew(
                [(e.lease.lock.names, e.lease.owner, e.lease.lock.timeout) for e in batch],
                within=max(WITHIN_LEAST, min(urgency, WITHIN_MOST)),
            )
        except StoreError as exc:
            answers = [exc] * len(batch)
        except SURVIVED as exc:
            answers = [StoreError("?", repr(exc))] * len(batch)
            self._survive("renewing leases", exc)
        self._report_outage([answer for answer in answers if isinstance(answer, StoreError)])

        renewed, lost = [], []
        with self._mutex:
            for entry, answer in zip(batch, answers, strict=True):
                lease = entry.lease
                if not _valid(entry):
                    continue
                if answer is True:
                    lease.extend(sent_at)
                    self._schedule(lease)
                    renewed.append(lease)
                elif answer is False:
                    self._drop(lease)
                    lease.lose("the server no longer has it: expired, taken or deleted")
                    lost.append(lease)
                else:
                    self._retry(lease)
        for lease in renewed:
            self._report(signals.lock_renewed.send, sender=lease.sender, lease=lease)
        for lease in lost:
            self._report(lease.report_lost)

    def _schedule(self, lease: Lease) -> float:
        return self._put(lease, lease.trusted_until if lease.due is None else lease.due)

    def _retry(self, lease: Lease) -> None:
        now = self._clock()
        pause = min(RETRY_FIRST * 2 ** min(self._failures, 10), RETRY_MOST)
        left = lease.trusted_until - now
        self._put(lease, now + (min(pause, left / 4) if left > WITHIN_LEAST else left))

    def _put(self, lease: Lease, when: float) -> float:
        lease.watch_number = self._latest = next(self._numbers)
        heappush(self._timers, Entry(when, lease.watch_number, lease))
        return when

    def _drop(self, lease: Lease) -> None:
        lease.watch_number = 0
        self._watched.discard(lease)

    def _report_outage(self, errors: list[StoreError]) -> None:
        if errors:
            self._failures += 1
            if self._failures == 1:
                logger.warning("Cannot renew %d lock(s), trying again: %s", len(errors), errors[0])
        elif self._failures:
            logger.info("Locks are renewed again, after %d failed tries.", self._failures)
            self._failures = 0

    def _report(self, call: Callable[..., object], *args: object, **kwargs: object) -> None:
        try:
            call(*args, **kwargs)
        except SURVIVED as exc:
            self._survive("reporting on a lease", exc)

    def _survive(self, doing: str, exc: BaseException) -> None:
        self.errors += 1
        logger.error("Unexpected error while %s; the watchdog goes on.", doing, exc_info=exc)

    def _run(self, loop: object) -> None:
        while self._loop is loop:
            try:
                idle = self.tick()
                with self._mutex:
                    if idle != 0.0:
                        idle = self._idle_for()  # a lease may have come since
                        if idle != 0.0 and self._loop is loop:
                            self._wake.wait(idle)
            except SURVIVED as exc:
                self._survive("watching leases", exc)
                time.sleep(RETRY_FIRST)


def _at_cap(lease: Lease) -> bool:
    cap = lease.lock.options.max_renew_times
    return 0 < cap <= lease.renewals


def _why_expired(lease: Lease) -> str:
    expiry = lease.lock.options.lock_expire
    if expiry is not None:
        return f"its fixed expiry of {expiry:g} s ran out"
    return "it could not be renewed in time"


def _valid(entry: Entry) -> bool:
    return entry.number == entry.lease.watch_number
