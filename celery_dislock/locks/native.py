"""A thread of the operating system beside greenlets, and what it shares with them.

Under gevent and eventlet, ``threading`` makes greenlets, and all of them stop while one computes
without yielding.  The watchdog must go on then, so it uses the originals of what they have patched.
Its sockets are patched, and wait in a hub of this thread's own, which both libraries give to every
thread.  Therefore the thread must not share connections with greenlets.

Nothing of the application runs in this thread: signal receivers, log handlers and interruptions
belong in the thread of the hub.  :func:`in_hub` returns the way there.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from celery_dislock.locks.interruption import patched_by

if TYPE_CHECKING:
    from collections.abc import Callable

    Call = Callable[[], None]


def reentrant_lock() -> Any:
    """Return an RLock that belongs to a thread; in a patched process greenlets share it.

    A greenlet must not yield while it has the lock.
    """
    return _original("_thread", "RLock")()


def mutex() -> Any:
    """Return a lock that also excludes threads of the operating system beside greenlets.

    A greenlet must not yield while it has the lock, unless nobody waits for it.
    """
    return _original("_thread", "allocate_lock")()


class Bell:
    """Wakes the one thread that waits; a ring that comes before is kept."""

    def __init__(self) -> None:
        self._silent = _original("_thread", "allocate_lock")()
        self._silent.acquire()

    def ring(self) -> None:
        """Wake the thread that waits, or the next that does; never blocks."""
        with suppress(RuntimeError):  # it rings already
            self._silent.release()

    def wait(self, seconds: float | None) -> None:
        """Block until it rings, for at most *seconds*; None: without a limit."""
        if seconds is None:
            self._silent.acquire()
        else:
            self._silent.acquire(timeout=min(seconds, threading.TIMEOUT_MAX))


class Thread:
    """
    A daemon thread that runs a function, also where ``threading`` would make a greenlet.

    Args:
        run: The function.
        name: Name of the thread; a thread beside greenlets has none.
    """

    def __init__(self, run: Call, name: str) -> None:
        self._run = run
        self._ident: int | None = None
        self._ended = _original("_thread", "allocate_lock")()
        self._ended.acquire()
        if patched_by():
            _original("_thread", "start_new_thread")(self._run_native, ())
        else:
            threading.Thread(target=self._run_native, name=name, daemon=True).start()

    def _run_native(self) -> None:
        self._ident = _original("_thread", "get_ident")()
        try:
            self._run()
        finally:
            self._ended.release()

    def is_alive(self) -> bool:
        """Return whether the function has not ended."""
        return bool(self._ended.locked())

    def is_current(self) -> bool:
        """Return whether the caller runs in this thread."""
        return bool(self._ident == _original("_thread", "get_ident")())

    def join(self, seconds: float) -> None:
        """Block until the function has ended, for at most *seconds*."""
        if self._ended.acquire(timeout=seconds):
            self._ended.release()


def at_once(call: Call) -> None:
    """Call it here; the way to the application where no greenlets are."""
    call()


def in_hub() -> Callable[[Call], None]:
    """Return a function with which any thread has calls made, in order, in a greenlet of this hub.

    The calls wait while a greenlet computes without yielding.
    """
    return _InGevent() if patched_by() == "gevent" else _InEventlet()


class _InGevent:
    def __init__(self) -> None:
        import gevent  # noqa: PLC0415 -- optional; it has patched this process

        self._calls: deque[Call] = deque()
        # Does not count as something that gevent.wait() waits for.
        self._news = gevent.get_hub().loop.async_(ref=False)
        self._news.start(gevent.spawn, _make_all, self._calls)

    def __call__(self, call: Call) -> None:
        self._calls.append(call)
        self._news.send()


class _InEventlet:
    def __init__(self) -> None:
        import eventlet  # noqa: PLC0415 -- optional; it has patched this process
        from eventlet.green import socket  # noqa: PLC0415

        self._calls: deque[Call] = deque()
        self._heard, self._told = socket.socketpair()
        self._spawn = eventlet.spawn_n
        self._spawn(self._listen)

    def __call__(self, call: Call) -> None:
        self._calls.append(call)
        with suppress(BlockingIOError):  # enough bytes are there to be heard
            self._told.fd.send(b".")

    def _listen(self) -> None:
        while self._heard.recv(4096):
            self._spawn(_make_all, self._calls)


def _make_all(calls: deque[Call]) -> None:
    with suppress(IndexError):
        while True:
            calls.popleft()()


def _original(module: str, name: str) -> Any:
    by = patched_by()
    if by == "gevent":
        from gevent.monkey import get_original  # noqa: PLC0415 -- optional

        return get_original(module, name)
    if by == "eventlet":
        from eventlet.patcher import original  # noqa: PLC0415 -- optional

        return getattr(original(module), name)
    return getattr(import_module(module), name)
