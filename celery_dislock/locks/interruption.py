"""Stop a body that is running, from another thread or greenlet.

How depends on where the body runs, which :func:`running_here` finds out on the spot:

====================  ==========================================================================
a greenlet            the exception is thrown into it when its hub gets to it
the main thread       (prefork child, solo worker) a signal, whose handler raises; this also ends
                      a blocking system call
any other thread      an asynchronous exception, which CPython raises before the next bytecode:
                      a blocking call is not interrupted, it ends first
====================  ==========================================================================

The body is armed while it runs and disarmed when it has ended, under a mutex: an exception that
comes too late is dropped.  One that was thrown but not yet raised when the body ends is raised
between the two, inside the caller's ``finally``: callers nest two of them.

SIGURG carries the interruption: ignored by default, so a late one is harmless, and used by neither
Celery nor billiard (SIGUSR1 is the soft time limit).
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from types import FrameType

SIGNAL = getattr(signal, "SIGURG", None)
MOST_JUMPS = 1000  # after which an asynchronous exception was raised, if there was one


class Target(Protocol):
    """A running body that can be interrupted."""

    def throw(self, exc: BaseException) -> None:
        """Raise the exception in the body, soon, if it still runs; does not wait for that."""

    def disarm(self) -> None:
        """The body has ended: throw nothing more into what runs there next."""


def running_here() -> Target:
    """Make a target of what the caller runs in; it is armed."""
    by = patched_by()
    if by:
        return _GeventTarget() if by == "gevent" else _EventletTarget()
    if SIGNAL is not None and threading.current_thread() is threading.main_thread():
        return _MainThreadTarget(SIGNAL)
    return _ThreadTarget()


def refusal() -> str:
    """Say why what the caller runs in cannot be stopped; empty where it can."""
    greenlets: Any = sys.modules.get("greenlet")
    here = greenlets.getcurrent() if hasattr(greenlets, "getcurrent") else None
    if here is not None and here.parent is not None and not patched_by():
        return "a greenlet can be stopped only where gevent or eventlet has patched the process"
    if not hasattr(ctypes, "pythonapi"):
        return "this Python cannot raise an exception in another thread"
    return ""


def patched_by() -> str:
    """Return what has patched the threads of this process: gevent, eventlet, or nothing."""
    if _patched("gevent.monkey", "is_module_patched", "threading"):
        return "gevent"
    return "eventlet" if _patched("eventlet.patcher", "is_monkey_patched", "thread") else ""


def _patched(module: str, question: str, what: str) -> bool:
    patcher = sys.modules.get(module)
    return patcher is not None and getattr(patcher, question)(what)


class _GeventTarget:
    def __init__(self) -> None:
        import gevent  # noqa: PLC0415 -- only there when it has patched this process

        self._greenlet = gevent.getcurrent()
        self._hub = gevent.get_hub()
        self._armed = True

    def throw(self, exc: BaseException) -> None:
        self._hub.loop.run_callback(self._throw_now, exc)

    def _throw_now(self, exc: BaseException) -> None:
        if self._armed:
            self._greenlet.throw(exc)

    def disarm(self) -> None:
        self._armed = False


class _EventletTarget:
    def __init__(self) -> None:
        import eventlet.hubs  # noqa: PLC0415 -- only there when it has patched this process

        self._hub = eventlet.hubs.get_hub()
        self._greenlet = eventlet.getcurrent()
        self._armed = True

    def throw(self, exc: BaseException) -> None:
        self._hub.schedule_call_global(0, self._throw_now, exc)

    def _throw_now(self, exc: BaseException) -> None:
        if self._armed:
            self._greenlet.throw(exc)

    def disarm(self) -> None:
        self._armed = False


class _MainThreadTarget:
    """The handler runs in the main thread, as the body does: one assignment arms or disarms."""

    armed: ClassVar[tuple[_MainThreadTarget, ...]] = ()  # the outermost body comes first

    def __init__(self, signum: int) -> None:
        self.pending: BaseException | None = None
        self._signum = signum
        self._ident = threading.get_ident()
        if signal.getsignal(signum) is not _raise_pending:
            signal.signal(signum, _raise_pending)
        _MainThreadTarget.armed = (*_MainThreadTarget.armed, self)

    def throw(self, exc: BaseException) -> None:
        self.pending = exc
        signal.pthread_kill(self._ident, self._signum)

    def disarm(self) -> None:
        # Blocks of generators end in any order.
        _MainThreadTarget.armed = tuple([one for one in _MainThreadTarget.armed if one is not self])


def _raise_pending(_signum: int, _frame: FrameType | None) -> None:
    for target in reversed(_MainThreadTarget.armed):
        if target.pending is not None:
            exc, target.pending = target.pending, None
            raise exc


class _ThreadTarget:
    def __init__(self) -> None:
        self._ident = ctypes.c_ulong(threading.get_ident())
        self._mutex = threading.Lock()
        self._armed = True
        self._thrown = False

    def throw(self, exc: BaseException) -> None:
        with self._mutex:
            if self._armed:
                self._thrown = True
                self._set_async(_raised_as(exc))

    def disarm(self) -> None:
        with self._mutex:
            self._armed = False
            thrown = self._thrown
        if thrown:
            self._absorb()

    def _absorb(self) -> None:
        """
        Take back what may not have been raised yet.

        Another exception takes its place and is raised here, by the next jump back at the latest.
        CPython 3.11 does not take well to none in its place: it goes on looking for one before each
        instruction, and when the process is traced, before the same one for ever.
        """
        try:
            self._set_async(_Absorbed)
            for _ in range(MOST_JUMPS):
                pass
        except _Absorbed:
            pass

    def _set_async(self, exc: type[BaseException]) -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(self._ident, ctypes.py_object(exc))


class _Absorbed(BaseException):
    """Raised and caught in place of an interruption that came too late."""


def _raised_as(exc: BaseException) -> type[BaseException]:
    """Make a class whose instances stand for *exc*: CPython raises a class, and calls it."""
    kind = type(exc)

    def __init__(self: BaseException) -> None:  # noqa: N807
        BaseException.__init__(self, *exc.args)
        self.__dict__.update(exc.__dict__)

    def __reduce__(_self: BaseException) -> Any:  # noqa: N807
        return exc.__reduce__()

    return type(
        kind.__name__,
        (kind,),
        {
            "__init__": __init__,
            "__reduce__": __reduce__,
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
        },
    )
