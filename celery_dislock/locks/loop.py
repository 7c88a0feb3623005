"""The thread of a watchdog: it sleeps until a step is due, and does it.

A step takes one round trip at most.  The thread never dies: it logs and counts an unexpected
exception, and goes on.

The thread *beats* before each step, round trip and sleep, and notes how long each may take.  So it
notices that it did not run when it should have: the process was stopped, or a body held the GIL.

Under gevent and eventlet, ``threading`` makes greenlets, and all of them stop while one computes
without yielding.  The watchdog must go on then, so it is a thread of the operating system, made
with the original functions that these libraries have patched.  Its sockets are patched, and wait in
a hub of its own, as both libraries give one to every thread.  Therefore the thread must not share
connections with greenlets.  Nothing of the application runs in it: signal receivers, log handlers
and interruptions belong in the thread of the application's hub, and reports are made there.
"""

from __future__ import annotations

import _thread
import logging
import os
import threading
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from celery_dislock.clock import FOREVER, monotonic
from celery_dislock.exceptions import StoreError
from celery_dislock.locks.interruption import patched_by

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Call = Callable[[], object]
    Step = tuple[Callable[[], float], Callable[[float], None]]

WAITS = 4  # waits of one round trip to a server that is away: to connect, two replies, Sentinels
STALL_LEAST = 0.25  # seconds by which a beat must be late to show that the process was stalled
ERROR_PAUSE = 0.1  # seconds after an unexpected exception
STOP_WITHIN = 2.0  # seconds to wait for the end of the thread

logger = logging.getLogger("celery_dislock")


class Loop:
    """
    A daemon thread that does the steps of a subclass.  It starts with the first :meth:`wake`.

    Args:
        clock: Returns monotonic seconds.
        threaded: False: no thread is started, and the caller calls :meth:`tick`.
        beside_greenlets: Reports are made in a greenlet of the hub.

    Attributes:
        steps: Pairs of functions, the most urgent pair first.  The first returns the time at which
            a step is due, FOREVER if none is.  The second does the step, and is given the time.
        clock: The argument of that name.
        errors: Unexpected exceptions that the thread has survived.
        wakes_at: Time at which the thread wakes by itself; FOREVER: it sleeps until the bell rings.
    """

    steps: Sequence[Step] = ()

    def __init__(
        self,
        *,
        clock: Callable[[], float] = monotonic,
        threaded: bool = True,
        beside_greenlets: bool = False,
    ) -> None:
        self.clock = clock
        self.errors = 0
        self._threaded = threaded
        self._beside_greenlets = beside_greenlets
        self._report_to: Callable[[Call], None] = at_once
        self._beats_at = clock()
        self._may_be_late = 0.0
        self._bell = _taken()  # to release this lock is to ring the bell
        self.begin()
        _living.add(self)

    def begin(self) -> None:
        """Begin, here or in a forked child: the parent's thread may have had the mutex."""
        self.wakes_at = FOREVER
        self._runs = not self._threaded  # without a thread, the caller of tick() stands for it
        # A lock that the running thread releases at its end.  A thread with another lock ends.
        self._current: Any = None
        self._ident = 0  # id of that thread
        # Reentrant: while this thread has the mutex, a signal handler may take or release a lock,
        # and so may a generator that the interpreter closes.
        self._mutex = reentrant_lock()

    def wake(self, when: float) -> None:
        """Have the steps looked at when one is due at *when*; does not block."""
        with self._mutex:
            self.start()
            # In this order: an exception that interrupts this call costs one more ring.
            self._ring()
            self.wakes_at = min(self.wakes_at, when)

    def start(self) -> None:
        """Start the thread, unless it runs."""
        with self._mutex:
            if self._runs:
                return
            if self._beside_greenlets and self._report_to is at_once:
                self._report_to = in_hub()
            # If an exception interrupts this call, the next start replaces the thread, and a thread
            # that was started here ends.
            self._current = current = _taken()
            self._beats_at, self._may_be_late = self.clock(), 0.0
            _start_thread(partial(self._run, current))
            self._runs = True

    def stop(self) -> None:
        """Stop the thread; blocks until it has ended, 2 s at most.  :meth:`wake` starts another."""
        if not self._threaded:
            return
        with self._mutex:  # in this order: if interrupted, the next start replaces the thread
            self.wakes_at = FOREVER
            ran, self._runs = self._runs, False
            current, self._current = self._current, None
        self._ring()
        if ran and self._ident != _original("get_ident")():
            current.acquire(timeout=STOP_WITHIN)

    def tick(self) -> float | None:
        """
        Do each step that is due.

        Returns:
            Seconds until the next step, 0 if one is due now, None if there is nothing to do.
        """
        for due_at, step in self.steps:
            now = self.beat()  # before each step, so that the step knows of a stall
            if due_at() <= now:
                step(now)
        # Keep the time at which the thread was to wake for a lease, even if that lease has ended.
        # Otherwise a process that takes and releases locks in turn would ring for each of them.
        woken_for = self.wakes_at if self.wakes_at > self.clock() else FOREVER
        self.wakes_at = FOREVER  # so a lease that is watched from now on rings the bell
        next_at = min(woken_for, *(due_at() for due_at, _ in self.steps))
        self.wakes_at = next_at if self._runs or self._current else FOREVER
        now = self.beat(0.0 if next_at == FOREVER else next_at)
        return None if next_at == FOREVER else max(0.0, next_at - now)

    def beat(self, again_at: float = 0.0, *, within: float = 0.0) -> float:
        """
        Note that the thread runs, and call :meth:`stalled` if it did not; returns the time.

        Args:
            again_at: Monotonic time of the next beat; 0: soon.
            within: Maximum seconds for each reply of a round trip before the next beat.
        """
        now, since = self.clock(), self._beats_at
        if now >= since + self._may_be_late + STALL_LEAST:
            self.stalled(since, now)
        self._beats_at, self._may_be_late = max(now, again_at), WAITS * within
        return now

    def stalled(self, since: float, now: float) -> None:
        """Called with two times between which the thread did not run."""

    def ended(self) -> None:
        """Called in the thread at its end."""

    def ask(self, doing: str, within: float, request: Callable[[], Any], count: int = 1) -> Any:
        """
        Make a round trip after a beat.

        Args:
            doing: What the request does, for the log.
            within: Maximum seconds for each reply.
            request: Makes the round trip.
            count: Number of answers that it returns.

        Returns:
            The answers.  If the request raises an error, a StoreError in place of each.
        """
        self.beat(within=within)
        try:
            return request()
        except StoreError as exc:
            error = exc
        except BaseException as exc:  # noqa: BLE001 -- a receiver may raise anything
            self._survive(doing, exc)
            error = StoreError("?", repr(exc))
        return [error] * count

    def report(self, call: Callable[..., object], *args: object) -> None:
        """Make a call in a thread in which code of the application may run."""
        self._report_to(partial(self._call, call, *args))

    def _call(self, call: Callable[..., object], *args: object) -> None:
        try:
            call(*args)
        except BaseException as exc:  # noqa: BLE001 -- a receiver may raise anything
            self._survive("reporting on a lease", exc)

    def _survive(self, doing: str, exc: BaseException) -> None:
        """Log what was raised, also if it is no Exception, such as the Timeout of gevent."""
        if isinstance(exc, KeyboardInterrupt):
            raise exc
        self.errors += 1
        #: ERROR: One of your signal receivers has raised, or this package has a bug. -> Read the
        #: traceback.
        message = "Unexpected error while %s; the watchdog goes on."
        self._report_to(partial(logger.error, message, doing, exc_info=exc))

    def _run(self, current: Any) -> None:
        self._ident = _original("get_ident")()
        try:
            while self._current is current:
                try:
                    idle = self.tick()
                except BaseException as exc:  # noqa: BLE001 -- a receiver may raise anything
                    self._survive("watching leases", exc)
                    idle = ERROR_PAUSE
                if idle != 0.0 and self._current is current:
                    # Returns at once if the bell has rung since tick() began.
                    limit = -1 if idle is None else min(idle, threading.TIMEOUT_MAX)
                    self._bell.acquire(timeout=limit)
            self.ended()
        finally:
            with self._mutex:
                self.wakes_at = FOREVER
                if self._current is current:
                    self._current, self._runs = None, False
            current.release()

    def _ring(self) -> None:
        """Wake the thread, or keep it from its next sleep."""
        with suppress(RuntimeError):  # it rings already
            self._bell.release()


_living: WeakSet[Loop] = WeakSet()


def _begin_anew() -> None:
    for loop in list(_living):
        loop.begin()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


def reentrant_lock() -> Any:
    """Return an RLock whose owner is a thread; in a patched process its greenlets share it.

    A greenlet must not yield while it has the lock.
    """
    return _original("RLock")()


def mutex() -> Any:
    """Return a lock that also excludes threads of the operating system beside greenlets.

    A greenlet must not yield while it has the lock, unless nobody waits for it.
    """
    return _original("allocate_lock")()


def _taken() -> Any:
    taken = mutex()
    taken.acquire()
    return taken


def _start_thread(run: Call) -> None:
    """Start a daemon thread; beside greenlets it has no name."""
    if patched_by():
        _original("start_new_thread")(run, ())
    else:
        threading.Thread(target=run, name="dislock-watchdog", daemon=True).start()


def _original(name: str) -> Any:
    """Return a function of the module _thread, which gevent and eventlet patch."""
    by = patched_by()
    if by == "gevent":
        from gevent.monkey import get_original  # noqa: PLC0415 -- optional

        return get_original("_thread", name)
    if by == "eventlet":
        from eventlet.patcher import original  # noqa: PLC0415 -- optional

        return getattr(original("_thread"), name)
    return getattr(_thread, name)


def at_once(call: Call) -> None:
    """Make a call here: without greenlets, code of the application may run in this thread."""
    call()


def in_hub() -> Callable[[Call], None]:
    """Return a function with which any thread has calls made, in order, in a greenlet of this hub.

    The calls wait while a greenlet computes without yielding.
    """
    calls: deque[Call] = deque()

    def make_all() -> None:
        with suppress(IndexError):
            while True:
                calls.popleft()()

    wake = (_by_gevent if patched_by() == "gevent" else _by_eventlet)(make_all)

    def call_soon(call: Call) -> None:
        calls.append(call)
        wake()

    return call_soon


def _by_gevent(make_all: Call) -> Call:
    """Return what has a greenlet make the calls soon."""
    import gevent  # noqa: PLC0415 -- optional; it has patched this process

    # Does not count as something that gevent.wait() waits for.
    news = gevent.get_hub().loop.async_(ref=False)
    news.start(gevent.spawn, make_all)
    return news.send  # type: ignore[no-any-return]


def _by_eventlet(make_all: Call) -> Call:
    """Return what has a greenlet make the calls soon."""
    import eventlet  # noqa: PLC0415 -- optional; it has patched this process
    from eventlet.green import socket  # noqa: PLC0415

    heard, told = socket.socketpair()

    def listen() -> None:
        while heard.recv(4096):
            eventlet.spawn_n(make_all)

    def wake() -> None:
        with suppress(BlockingIOError):  # enough bytes are there to be heard
            told.fd.send(b".")

    eventlet.spawn_n(listen)
    return wake
