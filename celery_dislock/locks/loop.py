"""A loop over jobs, in one background thread per process.

A job has a time at which it is due, and does one step when it runs: a round trip at most.  The loop
sleeps until the first job is due.  It never dies: an unexpected exception is logged and counted,
and the loop goes on.

The loop also notices that it did not run when it should have: the process was stopped, or a body
held the GIL.  It *beats* before and after everything that takes time.

Beside greenlets the loop is a thread of the operating system, and what a job has to report is
reported in the thread of the hub; see :mod:`celery_dislock.locks.native`.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from celery_dislock.clock import FOREVER, monotonic
from celery_dislock.exceptions import StoreError
from celery_dislock.locks.native import Bell, Thread, at_once, in_hub, reentrant_lock

if TYPE_CHECKING:
    from collections.abc import Callable

WITHIN_MOST = 1.0  # maximum seconds to wait for the server's reply
WAITS = 4  # for a server that is away: to connect, for two replies, and for the Sentinels
STALL_LEAST = 0.25  # seconds by which a beat is late if the process was stalled
SURVIVED = (Exception, SystemExit)  # a signal receiver may raise either
PAUSE = 0.1  # seconds after an unexpected exception

Answer = TypeVar("Answer")

logger = logging.getLogger("celery_dislock")


class Job(Protocol):
    """What the loop does again and again; a step takes one round trip at most."""

    def due_at(self) -> float:
        """Return the monotonic time of the next step; FOREVER: there is none."""

    def run(self, now: float) -> None:
        """Do a step; called if it is due."""


class Loop:
    """
    Runs jobs in a daemon thread, which starts with the first :meth:`wake`.

    Args:
        clock: Returns monotonic seconds.
        threaded: False: no thread is started, and the caller calls :meth:`tick`.
        beside_greenlets: Reports are made in a greenlet of the hub.
        close: Called by the thread at its end.

    Attributes:
        jobs: The jobs; those that come first run first.
        clock: The argument of that name.
        errors: Unexpected exceptions that the loop has survived.
        report_to: Makes the calls of :meth:`report`.
        on_stall: Called with two times between which the loop did not run; None: nobody asks.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = monotonic,
        threaded: bool = True,
        beside_greenlets: bool = False,
        close: Callable[[], None] | None = None,
    ) -> None:
        self.jobs: list[Job] = []
        self.clock = clock
        self.errors = 0
        self.report_to: Callable[[Callable[[], None]], None] = at_once
        self.on_stall: Callable[[float, float], None] | None = None
        self._threaded = threaded
        self._beside_greenlets = beside_greenlets
        self._close = close
        self._thread: Thread | None = None
        self._current: object = None  # identifies the thread that runs; any other thread ends
        # Reentrant: while this thread has the mutex, a signal handler may take or release a lock,
        # and so may a generator that the interpreter closes.
        self._mutex = reentrant_lock()
        self._bell = Bell()
        self._wakes_at = 0.0
        self._beats_at = clock()
        self._may_be_late = 0.0

    def wake(self, when: float) -> None:
        """Have the jobs looked at when a job is due at *when*; does not block."""
        if when < self._wakes_at:
            self._wakes_at = when
            self._bell.ring()
        if self._threaded and (self._thread is None or not self._thread.is_alive()):
            self.start()

    def start(self) -> None:
        """Start the thread, unless it runs."""
        with self._mutex:
            if self._thread is not None and self._thread.is_alive():
                return
            if self._beside_greenlets and self.report_to is at_once:
                self.report_to = in_hub()
            # If an exception interrupts this call, the next start replaces the thread, and a thread
            # that was started here ends.
            self._current = current = object()
            self._beats_at, self._may_be_late = self.clock(), 0.0
            self._thread = Thread(partial(self._run, current), "dislock-watchdog")

    def stop(self) -> None:
        """Stop the thread; blocks until it has ended, 2 s at most.  :meth:`wake` starts another."""
        with self._mutex:
            thread, self._thread, self._current = self._thread, None, None
        self._bell.ring()
        if thread is not None and not thread.is_current():
            thread.join(WITHIN_MOST * 2)

    def tick(self) -> float | None:
        """
        Let each job that is due do a step.

        Returns:
            Seconds until the next step, 0 if one is due now, None if there is nothing to do.
        """
        for job in self.jobs:
            now = self.beat()  # no job is given a time at which a stall is not known yet
            if job.due_at() <= now:
                job.run(now)
        # What it was woken for stays, also if that has ended by now: a process that takes and
        # releases locks in turn would otherwise wake it for each of them.
        asked_for = self._wakes_at if self._wakes_at > self.clock() else FOREVER
        self._wakes_at = FOREVER  # what becomes due while the next line runs rings the bell
        self._wakes_at = due_at = min([asked_for, *(job.due_at() for job in self.jobs)])
        if due_at == FOREVER:
            self.beat()
            return None
        self.beat(due_at)
        return max(0.0, due_at - self.clock())

    def beat(self, again_at: float = 0.0, *, within: float = 0.0) -> float:
        """
        Show that the loop runs, and notice that it did not; returns the time.

        Args:
            again_at: Monotonic time of the next beat, if that is not now.
            within: Maximum seconds for each reply of a round trip that comes before it.
        """
        now, since = self.clock(), self._beats_at
        if self.on_stall is not None and now >= since + self._may_be_late + STALL_LEAST:
            self.on_stall(since, now)
        self._beats_at, self._may_be_late = max(now, again_at), WAITS * within
        return now

    def ask(self, doing: str, within: float, request: Callable[[], Answer]) -> Answer | StoreError:
        """
        Make a round trip between two beats; an unexpected error is survived.

        Args:
            doing: What the request does, for the log.
            within: Maximum seconds for each reply.
            request: Makes the round trip.

        Returns:
            What it returns, or its error.
        """
        self.beat(within=within)
        try:
            return request()
        except StoreError as exc:
            return exc
        except SURVIVED as exc:
            self.survive(doing, exc)
            return StoreError("?", repr(exc))
        finally:
            self.beat()

    def report(self, call: Callable[..., object], *args: object, **kwargs: object) -> None:
        """Call this in a thread in which code of the application may run."""
        self.report_to(partial(self._call, call, *args, **kwargs))

    def survive(self, doing: str, exc: BaseException) -> None:
        """Log and count an unexpected exception."""
        self.errors += 1
        message = "Unexpected error while %s; the watchdog goes on."
        self.report_to(partial(logger.error, message, doing, exc_info=exc))

    def _call(self, call: Callable[..., object], *args: object, **kwargs: object) -> None:
        try:
            call(*args, **kwargs)
        except SURVIVED as exc:
            self.survive("reporting on a lease", exc)

    def _run(self, current: object) -> None:
        while self._current is current:
            try:
                idle = self.tick()
            except SURVIVED as exc:
                self.survive("watching leases", exc)
                idle = PAUSE
            if idle != 0.0 and self._current is current:
                self._bell.wait(idle)  # returns at once if it has rung since
        if self._close is not None:
            self._close()
