"""Stop a running body from another thread or greenlet.

The method depends on where the body runs, which :func:`running_here` determines:

====================  ==========================================================================
an asyncio task       the event loop cancels the task; :meth:`TaskTarget.settle` tells that
                      cancellation from others
a greenlet            the hub throws the exception into the greenlet in its next round
the main thread       (prefork child, solo worker) the handler of a signal raises the exception;
                      this also interrupts a blocking system call
any other thread      an asynchronous exception, which CPython raises between two bytecodes;
                      a blocking call is not interrupted, and must return first
====================  ==========================================================================

A target is armed while the body runs and disarmed when the body has ended.  An exception that is
thrown after that is dropped.  An exception that was thrown before, but is not raised yet, may be
raised inside the caller's ``finally`` until the target is disarmed.  Callers therefore nest two
``finally`` clauses.

The signal is SIGURG.  Its default action is to ignore it, so a late signal is harmless.  Celery and
billiard do not use it (SIGUSR1 is the soft time limit).
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import sys
import threading
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Protocol
from weakref import ref

from billiard import current_process
from billiard.exceptions import SoftTimeLimitExceeded

from celery_dislock.exceptions import LockLostError, SupersededError
from celery_dislock.servers.bridge import current_call, current_greenlet, wait_again
from celery_dislock.servers.records import in_words

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from celery_dislock.locks.lease import Lease
    from celery_dislock.servers.bridge import Call

# Exceptions that may be raised in a body at any instruction, and must end the body.  Code of ours
# that runs in a body and catches all errors lets these pass.  Others that end a body, such as
# SystemExit, are no subclasses of Exception.
THROWN = (SoftTimeLimitExceeded, LockLostError, SupersededError)

SIGNAL = getattr(signal, "SIGURG", None)
MOST_JUMPS = 1000  # loop iterations within which a pending asynchronous exception is raised


STOPPING = {"raise", "terminate"}  # actions that stop a body
KILL_AFTER = 1.0  # seconds for the body to stop before its pool process is killed

logger = logging.getLogger("celery_dislock")


class Target(Protocol):
    """A running body that can be interrupted."""

    def throw(self, exc: BaseException) -> None:
        """Have the exception raised soon in the body, if the body still runs.  Does not block."""

    def disarm(self) -> None:
        """Stop throwing exceptions here, because the body has ended."""


def running_here(block: FrameType | None = None) -> Target:
    """
    Return an armed target for the calling thread, greenlet or asyncio task.

    Args:
        block: The frame of a ``with`` statement, which may be suspended and go on elsewhere.  A
            thread or greenlet is interrupted only while it runs in that frame, as it may do other
            work meanwhile.  None: the body ends in the thread or greenlet in which it has begun.
    """
    call = current_call()
    if call is not None:
        return TaskTarget(call)
    by = patched_by()
    if by:
        return _GreenletTarget(by, block)
    if SIGNAL is not None and threading.current_thread() is threading.main_thread():
        return _MainThreadTarget(SIGNAL)
    return _ThreadTarget(block)


def why_not_interruptible() -> str:
    """Return why the calling thread or greenlet cannot be interrupted; empty if it can."""
    if current_call() is not None:
        return ""
    here = current_greenlet()
    if here is not None and here.parent is not None and not patched_by():
        return "a greenlet can be stopped only where gevent or eventlet has patched the process"
    if not hasattr(ctypes, "pythonapi"):
        return "this Python cannot raise an exception in another thread"
    return ""


def patched_by() -> str:
    """Return "gevent" or "eventlet" if one has patched this process's threads, else ""."""
    if _patched("gevent.monkey", "is_module_patched", "threading"):
        return "gevent"
    return "eventlet" if _patched("eventlet.patcher", "is_monkey_patched", "thread") else ""


def _patched(module: str, question: str, what: str) -> bool:
    patcher = sys.modules.get(module)
    return patcher is not None and getattr(patcher, question)(what)


class TaskTarget:
    """
    Target for an asyncio task, which is cancelled as :func:`asyncio.timeout` does it.

    Args:
        call: A call that the task awaits.
    """

    def __init__(self, call: Call) -> None:
        # Weak: otherwise a task that can never go on would live, and keep its lock.
        self._task, self._loop = ref(call.task), call.loop
        # How many cancellations others have asked for before; Python 3.10 does not count them.
        self._cancels = 0
        if sys.version_info >= (3, 11):
            self._cancels = call.task.cancelling()
        self._armed, self._thrown = True, False

    def throw(self, exc: BaseException) -> None:  # noqa: ARG002 -- the block's end makes it anew
        """Have the task cancelled; see :class:`Target`."""
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        task: Any = self._task()
        if not self._armed or task is None:
            return
        self._thrown = True
        if sys.version_info >= (3, 11):
            task.cancel(self)
        elif not task._must_cancel:  # noqa: SLF001 -- else somebody's cancellation lost its message
            task.cancel(self)
            task._cancel_message = self  # noqa: SLF001 -- which the next cancellation replaces

    def disarm(self) -> None:
        """See :class:`Target`."""
        self._armed = False
        self.settle(None)

    def settle(self, exc: BaseException | None) -> bool:
        """
        Take back the cancellation that this target has made, after the body has ended; only once.

        Args:
            exc: The exception that has ended the body.

        Returns:
            Whether *exc* is that cancellation, and nothing else has cancelled the task.
        """
        task: Any = self._task()
        if not self._thrown or task is None:
            return False
        self._thrown = False
        if sys.version_info >= (3, 11):
            alone = task.uncancel() <= self._cancels
        else:  # the exception has the message of the first request, the task that of the last
            alone = getattr(exc, "args", ()) == (self,) and task._cancel_message is self  # noqa: SLF001
        return alone and isinstance(exc, asyncio.CancelledError)


class _GreenletTarget:
    def __init__(self, by: str, block: FrameType | None) -> None:
        self._block = id(block) if block else 0  # the frame lives as long as the target is armed
        self._greenlet = current_greenlet()
        # Optional; it has patched this process.
        hub = import_module("gevent.hub" if by == "gevent" else "eventlet.hubs").get_hub()
        # Has the hub call a function in its next round.
        self._call_soon: Callable[..., object] = (
            hub.loop.run_callback if by == "gevent" else partial(hub.schedule_call_global, 0)
        )
        self._armed = True

    def throw(self, exc: BaseException) -> None:
        self._call_soon(self._throw_now, exc)

    def _throw_now(self, exc: BaseException) -> None:
        if self._armed and _runs_in(self._block, self._greenlet.gr_frame):
            self._greenlet.throw(exc)

    def disarm(self) -> None:
        self._armed = False


class _MainThreadTarget:
    """Target for the main thread.

    The signal handler runs in the same thread as the body, so arming and disarming need no mutex:
    each is one assignment.
    """

    armed: ClassVar[tuple[_MainThreadTarget, ...]] = ()  # the outermost body comes first

    def __init__(self, signum: int) -> None:
        self.pending: BaseException | None = None
        # Called when the signal has come from the worker's main process, which throws nothing.
        self.on_signal: Callable[[], None] = lambda: None
        self._signum = signum
        self._ident = threading.get_ident()
        if signal.getsignal(signum) is not _raise_pending:
            signal.signal(signum, _raise_pending)
        _MainThreadTarget.armed = (*_MainThreadTarget.armed, self)

    def throw(self, exc: BaseException) -> None:
        self.pending = exc
        signal.pthread_kill(self._ident, self._signum)

    def disarm(self) -> None:
        # This target need not be the last one: blocks inside generators end in any order.
        _MainThreadTarget.armed = tuple(
            [target for target in _MainThreadTarget.armed if target is not self]
        )


def _raise_pending(_signum: int, _frame: FrameType | None) -> None:
    for target in reversed(_MainThreadTarget.armed):
        if target.pending is not None:
            exc, target.pending = target.pending, None
            raise exc
    for target in _MainThreadTarget.armed:
        target.on_signal()


class _ThreadTarget:
    def __init__(self, block: FrameType | None) -> None:
        self._block = id(block) if block else 0
        self._ident = ctypes.c_ulong(threading.get_ident())
        self._mutex = threading.Lock()
        self._armed = True
        self._thrown = False

    def throw(self, exc: BaseException) -> None:
        frames = sys._current_frames()  # noqa: SLF001 -- CPython's, as faulthandler uses them
        runs_in_it = _runs_in(self._block, frames.get(self._ident.value))
        del frames
        with self._mutex:
            if self._armed and runs_in_it:
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
        Discard a thrown exception that may not have been raised yet.

        ``_Absorbed`` replaces the pending exception.  It is raised here, at the next backward jump
        at the latest, and caught.  Clearing the pending exception instead fails in CPython 3.11:
        the interpreter keeps checking for one before each instruction, and if the process is
        traced, it checks before the same instruction forever.
        """
        try:
            self._set_async(_Absorbed)
            for _ in range(MOST_JUMPS):
                pass
        except _Absorbed:
            pass

    def _set_async(self, exc: type[BaseException]) -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(self._ident, ctypes.py_object(exc))


def _runs_in(block: int, frame: FrameType | None) -> bool:
    """Return whether a stack has the frame with this id; True for the id 0."""
    while block and frame is not None and id(frame) != block:
        frame = frame.f_back
    return not block or frame is not None


class _Absorbed(BaseException):
    """Replaces an interruption that came too late; raised and caught here."""


def _raised_as(exc: BaseException) -> type[BaseException]:
    """Make a class whose instances equal *exc*.

    CPython's asynchronous exceptions are classes, which it calls without arguments.
    """
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


def is_pool_process() -> bool:
    """Return whether this is a process of a prefork pool."""
    return bool(current_process().name != "MainProcess")


class StopTask(BaseException):
    """Thrown into a body to terminate it; ``except Exception`` does not catch it."""

    def __init__(self, error: LockLostError | SupersededError) -> None:
        super().__init__(error)
        self.error = error


def why_stopped(lease: Lease) -> LockLostError | SupersededError:
    """Make the error that stops a body whose lease has ended, or that a newer task waits for."""
    if lease.told_at is not None and not (lease.lost or lease.capped):
        return SupersededError(lease.key, lease.superseded)
    return LockLostError(lease.key, lease.why_ended)


class Running:
    """
    A running body, which is stopped when its lease ends if the options ask for that.

    Args:
        lease: The lease.
        block: See :func:`running_here`.

    Attributes:
        target: What is interrupted.
    """

    def __init__(self, lease: Lease, block: FrameType | None = None) -> None:
        self._lease = lease
        self.target = running_here(block)
        self._mutex = threading.Lock()
        self._ended = False
        if isinstance(self.target, _MainThreadTarget):
            self.target.on_signal = partial(lease.lock.look_at, lease)
        lease.on_end = self._stop

    def begin(self) -> None:
        """
        Check just before the body starts that its lease has not ended already.

        Raises:
            LockLostError, SupersededError: The lease has ended, or a newer task waits for it to
                end, and the options ask to stop the body then.  The body must not run.
        """
        lease, options, action = self._lease, self._lease.lock.options, None
        if lease.lost:
            action = options.lock_on_lost
        elif lease.capped:
            action = options.lock_on_cap
        elif lease.told_at is not None:
            action = options.on_cancel
        if action in STOPPING:
            raise why_stopped(lease)

    def took_back(self, exc: BaseException) -> bool:
        """
        Take back the cancellation by which the end of the lease has stopped a coroutine.

        Returns:
            Whether *exc* was that cancellation, and the coroutine was not cancelled otherwise.
        """
        if isinstance(self.target, TaskTarget) and self.target.settle(exc):
            wait_again()
            return True
        return False

    def end(self) -> None:
        """End the interruptions, because the body has ended; nothing is thrown after this call."""
        with self._mutex:
            self._ended = True
        self.target.disarm()

    def _stop(self, lease: Lease, action: str) -> None:
        if action not in STOPPING:
            return
        error = why_stopped(lease)
        if action == "raise":
            self.target.throw(error)
            return
        self.target.throw(StopTask(error))
        if is_pool_process():
            killer = threading.Timer(KILL_AFTER, self._kill, (lease,))
            killer.daemon = True
            killer.start()

    def _kill(self, lease: Lease) -> None:
        with self._mutex:
            if not self._ended:
                #: ERROR: `terminate`, and the body has not stopped within a second; the main
                #: process frees the lock.
                logger.error(
                    "Killing process %d: %s does not stop: %s.",
                    *(os.getpid(), in_words(lease.holder), why_stopped(lease)),
                )
                os.kill(os.getpid(), signal.SIGKILL)
