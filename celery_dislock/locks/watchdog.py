"""Keep held leases alive, and report the leases that are lost.

One loop per process renews every lease of that process.  The loop sleeps until the next renewal is
due.  Then it renews that lease, and others that are due soon after, in one pipelined round trip on
a dedicated connection of the store.

Two heaps hold the leases.  *Timers* orders them by the time of the next action.  *Due* orders
the leases whose renewal is due by the end of the trust in them, so that after an outage the most
urgent come first.  A lease moves from timers to due, and back when it is renewed.  A lease is
removed by setting its number to zero: an entry whose number differs from its lease's is stale, and
is dropped when it reaches the top of its heap.

If a thread or greenlet that took a lease in plain Python has ended, its lease is no longer renewed,
because nothing else would release it.  The loop also keeps a list of owners that are done: the
server did not answer their release, or an exception interrupted their attempt to take a lock.
Their leases and places in line are released in batches, too.  Otherwise a process that hangs after
the body, in a result backend that is away, would keep its lock: the worker's main process renews
it.

After each batch the loop reads its clock again.  A failed batch is retried soon, with backoff, as
long as its leases are trusted.  The batches after it do not wait for the retry.

A pool process may be stalled: it was stopped, or a body held the GIL.  The worker's main process
then renews its leases.  So if the trust in a lease has ended while this process did not run, the
loop asks the server before it calls the lease lost.  A renewal succeeds only if the lease has never
expired, and then nobody else was let in.

The loop also runs the observer when it is due; see :mod:`celery_dislock.locks.observer`.

Beside greenlets the loop runs in a thread of the operating system, with a store of its own, and
what it has to report is reported in the thread of the hub; see :mod:`celery_dislock.locks.native`.

A pool process shows its figures to the worker's main process.  The loop does that, not the task:
at most once in SHOW_EVERY, and only if something has changed.  A lease that comes while nothing is
watched wakes the loop for it; those that follow within SHOW_EVERY do not.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count, islice
from typing import TYPE_CHECKING, NamedTuple

from celery_dislock import signals
from celery_dislock.exceptions import DamagedLockError, StoreError
from celery_dislock.locks.figures import Counts, written
from celery_dislock.locks.native import Bell, Thread, at_once, in_hub, reentrant_lock
from celery_dislock.locks.observer import FOREVER, Observer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from celery_dislock.locks.lease import Lease
    from celery_dislock.servers.reservations import Reservation
    from celery_dislock.servers.store import LateRelease, Store

BATCH = 500  # renewals in one round trip: about 5 ms of work for the server
EARLY = 1 / 20  # fraction of the renewal interval by which a renewal may be early to join a batch
RETRY_FIRST = 0.1  # seconds until the first retry of a renewal; doubled each time
RETRY_MOST = 1.0  # maximum seconds until a retry
WITHIN_MOST = 1.0  # maximum seconds to wait for the server's reply
WITHIN_LEAST = 0.05
WAITS = 4  # for a server that is away: to connect, for two replies, and for the Sentinels
STALL_LEAST = 0.25  # seconds by which the loop is late if its process was stalled
SURVIVED = (Exception, SystemExit)  # a signal receiver may raise either
CLEAR_FOR = 90.0  # seconds of retries to release an interrupted attempt; its place expires by then
SHOW_EVERY = 1.0  # seconds between two showings of the figures, at least
DEAD_ENTRIES = 1000  # number of stale heap entries above which a clean-up is worth its cost

logger = logging.getLogger("celery_dislock")


class Entry(NamedTuple):
    """A lease in one of the heaps; *number* breaks ties and marks stale entries."""

    when: float
    number: int
    lease: Lease


class Over(NamedTuple):
    """An owner that is done, and may still hold or wait for locks."""

    release: LateRelease
    until: float  # monotonic time after which the release is not retried


class Watchdog:
    """Renews the leases of this process.

    The loop runs in a daemon thread, which starts with the first lease.

    Args:
        store: Sends the renewals.
        clock: Returns monotonic seconds.
        threaded: False: no thread is started, and the caller calls :meth:`tick`.
        beside_greenlets: The store belongs to the loop alone, and reports are made in a greenlet.
        asks: Ask the server about a lease in which the trust has ended while this process was
            stalled, because another process may have renewed it.
        observer: What is told of the leases, and run by the loop; None: nobody.

    Attributes:
        errors: Unexpected exceptions that the loop has survived.
        counts: What the loop has counted.
        show: Called by the loop with the figures when they have changed; it must not block for
            long.  None: nobody wants them.
        asks: The argument of that name.
        observer: The argument of that name; never None.
    """

    def __init__(
        self,
        store: Store,
        *,
        clock: Callable[[], float] = time.monotonic,
        threaded: bool = True,
        beside_greenlets: bool = False,
        asks: bool = False,
        observer: Observer | None = None,
    ) -> None:
        self.errors = 0
        self.counts = Counts()
        self.show: Callable[[Mapping[str, Any]], None] | None = None
        self.asks = asks
        self.observer = observer or Observer()
        self._store = store
        self._clock = clock
        self._threaded = threaded
        self._beside_greenlets = beside_greenlets
        self._tell: Callable[[Callable[[], None]], None] = at_once
        self._thread: Thread | None = None
        self._loop: object = None  # identifies the current loop; any other loop ends
        # Reentrant: while this thread has the mutex, a signal handler may take or release a lock,
        # and so may a generator that the interpreter closes.
        self._mutex = reentrant_lock()
        self._bell = Bell()
        self._wakes_at = 0.0
        self._ran_until = 0.0  # after this time the loop may have been stalled, until its next tick
        self._numbers = count(1)
        self._latest = 0  # the last number given out
        self._timers: list[Entry] = []
        self._due: list[Entry] = []
        self._watched: set[Lease] = set()
        self._over: dict[str, Over] = {}  # by owner
        self._clear_at = 0.0
        self._failures = 0  # in a row
        self.observer.wake = self._expect_observer
        self._shown: object = None  # the state that the shown figures describe
        self._shown_at = 0.0

    def __len__(self) -> int:
        """Return the number of watched leases."""
        return len(self._watched)

    def watch(self, lease: Lease) -> None:
        """Renew this lease from now on; does not block."""
        with self._mutex:
            self._watched.add(lease)
            when = self._schedule(lease)
        if when < self._wakes_at:
            self._bell.ring()
        self._ensure_running()

    def unwatch(self, lease: Lease) -> None:
        """
        Stop renewing this lease; does not block.

        A renewal in progress may still reach the server before the release does.  Its reply is
        ignored.
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
        if self._latest == latest:  # else a signal handler has added an entry: clean up next time
            self._timers = kept

    def clear(self, release: LateRelease, *, timeout: float = 0.0) -> None:
        """
        Release soon the leases and places in line of an owner that is done; does not block.

        The release is retried until the server answers or :meth:`cleared` is called.  Leases and
        places end by themselves, so it is retried for *timeout* or ``CLEAR_FOR`` seconds at most; a
        ticket does not.  An owner that is done must not ask for a lock again.

        Args:
            release: The release.
            timeout: Seconds after which its leases have ended by themselves.
        """
        now = self._clock()
        if not self._over:
            self._clear_at = now + RETRY_MOST
        until = FOREVER if release.ending.ticket else now + max(CLEAR_FOR, timeout)
        self._over[release.owner] = Over(release, until)
        self._bell.ring()
        self._ensure_running()

    def cleared(self, owner: str) -> None:
        """Forget an owner that no longer holds or waits for a lock."""
        self._over.pop(owner, None)

    def _expect_observer(self) -> None:
        """Run the observer when it is due; does not block."""
        if self.observer.due_at() < self._wakes_at:
            self._bell.ring()
        self._ensure_running()

    def figures(self) -> dict[str, Any]:
        """Return the figures of this process; see :mod:`celery_dislock.locks.figures`."""
        with self._mutex:
            leases = self._watched.copy()
        return written(os.getpid(), leases, self.counts, self.errors)

    def show_figures(self) -> None:
        """Show the figures now, if somebody wants them."""
        if self.show is not None:
            self._shown, self._shown_at = self._state(), self._clock()
            self.show(self.figures())

    def _state(self) -> tuple[int, ...]:
        """Return numbers that change whenever the figures do."""
        return (self._latest, len(self._watched), self.errors, self.counts.failures)

    def start(self) -> None:
        """Start the loop, unless it runs."""
        with self._mutex:
            if self._thread is not None and self._thread.is_alive():
                return
            if self._beside_greenlets and self._tell is at_once:
                self._tell = in_hub()
            # If an exception interrupts this call, the next start replaces the loop, and a thread
            # that was started here ends.
            self._loop = loop = object()
            self._ran_until = self._clock()
            self._thread = Thread(partial(self._run, loop), "dislock-watchdog")

    def stop(self) -> None:
        """
        Stop the loop; blocks until it has ended, 2 s at most.

        Watched leases are no longer renewed, unless a new lease starts the loop again.
        """
        with self._mutex:
            thread, self._thread, self._loop = self._thread, None, None
        self._bell.ring()
        if thread is not None and not thread.is_current():
            thread.join(WITHIN_MOST * 2)

    def _ensure_running(self) -> None:
        if self._threaded and (self._thread is None or not self._thread.is_alive()):
            self.start()

    def tick(self) -> float | None:
        """
        Do what is due: one batch of renewals, and one of owners that are done; a round trip each.

        Returns:
            Seconds until the next action, 0 if more is due now, None if there is nothing to do.
        """
        now = self._clock()
        reports: list[Callable[[], None]] = []
        batch: list[Entry] = []
        with self._mutex:
            self._notice_stall(now)
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
        if self._observer_due_at() <= self._clock():
            self._run_observer()
        with self._mutex:
            return self._idle_for()

    def _notice_stall(self, now: float) -> None:
        """Keep asking the server about leases in which the trust ended during a stall."""
        if not self.asks or now - self._ran_until < STALL_LEAST:
            return
        for lease in self._watched.copy():
            interval = lease.lock.interval
            if interval is not None and self._ran_until < lease.trusted_until <= now:
                lease.asked_until = now + interval

    def _over_with(self, lease: Lease, now: float) -> Callable[[], None] | None:
        """Return the report to make if the lease is no longer renewed; None if it goes on."""
        if lease.kept_until <= now:
            lease.lose(_why_expired(lease))
            return lease.report_lost
        if lease.abandoned:
            return lease.report_abandoned
        if lease.lock.interval is not None and _at_cap(lease):
            lease.capped = True
            return lease.report_capped
        return None

    def _collect_due(self, now: float) -> None:
        while self._timers:
            first = self._timers[0]
            if first.when - (first.lease.lock.interval or 0.0) * EARLY > now:
                break
            entry = heappop(self._timers)
            if _valid(entry):
                heappush(self._due, Entry(entry.lease.kept_until, entry.number, entry.lease))

    def _idle_for(self) -> float | None:
        self._ran_until = self._clock()
        if self._due:
            return 0.0
        # The first entry may be stale, and then the loop wakes up once for nothing.  Skipping stale
        # entries would cost more: each of many short leases in a row would have to wake the loop.
        until = self._timers[0].when if self._timers else FOREVER
        if self._over:
            until = min(until, self._clear_at)
        until = min(until, self._observer_due_at())
        self._wakes_at = until
        if self.show is not None:
            shows_at = self._shows_at()
            # Nothing is watched, and that is shown: the next lease wakes the loop.
            self._wakes_at = min(until, shows_at) if shows_at < FOREVER else FOREVER
            until = min(until, shows_at)
        if until == FOREVER:
            return None
        self._ran_until = max(self._ran_until, until)
        return max(0.0, until - self._clock())

    def _shows_at(self) -> float:
        again_at = self._shown_at + SHOW_EVERY
        if self._shown != self._state() or self._clock() < again_at:
            return again_at
        # The end of a lease does not wake the loop.
        return self._clock() + SHOW_EVERY if self._watched else FOREVER

    def _show_changes(self) -> None:
        due = self._shown_at + SHOW_EVERY
        if self.show is not None and self._shown != self._state() and self._clock() >= due:
            self.show_figures()

    def _clear(self) -> None:
        """Release leases and places of owners that are done, one batch of them."""
        self._clear_at = self._clock() + RETRY_MOST
        batch = list(islice(self._over.copy().items(), BATCH))
        errors: Sequence[Exception | SystemExit | None]
        try:
            errors = self._store.clear([one.release for _, one in batch], within=WITHIN_MOST / 2)
        except SURVIVED as exc:
            errors = [exc] * len(batch)
            if not isinstance(exc, StoreError):
                self._survive("releasing leases", exc)
        now = self._clock()
        for (owner, one), error in zip(batch, errors, strict=True):
            if error is None or isinstance(error, DamagedLockError) or one.until < now:
                self.cleared(owner)
            else:  # behind the others
                self._over.pop(owner, None)
                self._over[owner] = one

    def _observer_due_at(self) -> float:
        """Return when the observer is due: not while the time is needed for renewals."""
        return FOREVER if self._failures else self.observer.due_at()

    def _run_observer(self) -> None:
        began = self._ran_until = self._clock()
        try:
            self.observer.run()
        except SURVIVED as exc:
            self._survive("running the observer", exc)
        now = self._clock()
        if now > began + WAITS * WITHIN_MOST / 2 + STALL_LEAST:
            with self._mutex:
                self._notice_stall(now)

    def _renew(self, batch: list[Entry]) -> None:
        sent_at = self._ran_until = self._clock()
        urgency = (batch[0].lease.kept_until - sent_at) / 2
        within = max(WITHIN_LEAST, min(urgency, WITHIN_MOST))
        answers: Sequence[bool | StoreError]
        try:
            answers = self._store.renew(
                [(e.lease.lock.names, e.lease.owner, e.lease.lock.timeout) for e in batch],
                within=within,
            )
        except StoreError as exc:
            answers = [exc] * len(batch)
        except SURVIVED as exc:
            answers = [StoreError("?", repr(exc))] * len(batch)
            self._survive("renewing leases", exc)
        errors = [answer for answer in answers if isinstance(answer, StoreError)]
        self.counts.failures += len(errors)
        self._report_outage(errors)
        self._heard(batch, answers, sent_at, until=sent_at + WAITS * within + STALL_LEAST)

    def _heard(
        self, batch: list[Entry], answers: Sequence[bool | StoreError], sent_at: float, until: float
    ) -> None:
        """
        Apply the answers to a batch.

        Args:
            batch: The leases.
            answers: What :meth:`Store.renew` returned.
            sent_at: Time before the renewals were sent.
            until: Time by which even a server that is away would have been given up.
        """
        renewed, lost = [], []
        self._keep([e.lease.reservation for e in batch if e.lease.reservation is not None], until)
        with self._mutex:
            if self._clock() > until:
                self._notice_stall(self._clock())
            for entry, answer in zip(batch, answers, strict=True):
                lease = entry.lease
                if not _valid(entry):
                    continue
                if answer is True:
                    self.counts.renewed(lease, sent_at)
                    lease.extend(sent_at)
                    self._schedule(lease)
                    renewed.append(lease)
                elif answer is False:
                    self._drop(lease)
                    lease.lose("the server no longer has it: expired, taken or deleted")
                    lost.append(lease)
                else:
                    self._retry(lease)
        self._tell_renewed(renewed)
        for lease in lost:
            self._report(lease.report_lost)

    def _tell_renewed(self, renewed: list[Lease]) -> None:
        if renewed:
            self._report(self._observe_renewed, renewed)
        if signals.lock_renewed.receivers:
            for lease in renewed:
                self._report(signals.lock_renewed.send, sender=lease.sender, lease=lease)

    def _observe_renewed(self, renewed: list[Lease]) -> None:
        for lease in renewed:
            self.observer.renewed(lease)

    def _keep(self, reservations: list[Reservation], until: float) -> None:
        """Keep the reservations of tasks that run; one that is missed costs no more than itself."""
        running = [one for one in reservations if one.until == "end"]
        if running:
            with suppress(StoreError):
                within = min(max(WITHIN_LEAST, until - self._clock()), WITHIN_MOST)
                self._store.reservations.keep(running, runs=True, within=within)

    def _schedule(self, lease: Lease) -> float:
        return self._put(lease, lease.trusted_until if lease.due is None else lease.due)

    def _retry(self, lease: Lease) -> None:
        now = self._clock()
        pause = min(RETRY_FIRST * 2 ** min(self._failures, 10), RETRY_MOST)
        left = lease.kept_until - now
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
                self.counts.outages += 1
                told = "Cannot renew %d lock(s), trying again: %s"
                self._report(logger.warning, told, len(errors), errors[0])
        elif self._failures:
            told = "Locks are renewed again, after %d failed tries."
            self._report(logger.info, told, self._failures)
            self._failures = 0

    def _report(self, call: Callable[..., object], *args: object, **kwargs: object) -> None:
        self._tell(partial(self._call, call, *args, **kwargs))

    def _call(self, call: Callable[..., object], *args: object, **kwargs: object) -> None:
        try:
            call(*args, **kwargs)
        except SURVIVED as exc:
            self._survive("reporting on a lease", exc)

    def _survive(self, doing: str, exc: BaseException) -> None:
        self.errors += 1
        told = "Unexpected error while %s; the watchdog goes on."
        self._tell(partial(logger.error, told, doing, exc_info=exc))

    def _run(self, loop: object) -> None:
        while self._loop is loop:
            try:
                idle = self.tick()
                self._show_changes()
                if idle != 0.0:
                    with self._mutex:
                        idle = self._idle_for()  # a lease may have been added since
                if idle != 0.0 and self._loop is loop:
                    self._bell.wait(idle)  # returns at once if it has rung since
            except SURVIVED as exc:
                self._survive("watching leases", exc)
                time.sleep(RETRY_FIRST)
        if self._beside_greenlets:
            self._store.close()  # here, because its sockets belong to this thread's hub


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
