"""Run blocking code on an event loop: where it would wait, the coroutine that runs it waits.

The code that talks to lock servers is written once, as blocking code.  It waits only in its
connections and pauses, and those come from a
:class:`~celery_dislock.servers.connecting.Driver`.  On an event loop the code runs in a greenlet
beside the coroutine that wants the result.  Where the code would wait, the greenlet gives the
coroutine something to await, and goes on with the result of that.

Source: SQLAlchemy has run its blocking core on event loops in this way since version 1.4.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

try:
    from greenlet import getcurrent, greenlet
except ImportError:  # it is an extra, and what gevent and eventlet stand on
    greenlet: Any = None  # type: ignore[no-redef]

    def getcurrent() -> Any:
        """Return None: nobody uses greenlets in this process."""


if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

#: Returns the greenlet that runs here; None: there is no greenlet in this process.
current_greenlet: Callable[[], Any] = getcurrent

P = ParamSpec("P")
T = TypeVar("T")

NO_TASK = (
    "an async lock is used in tasks of asyncio, and none runs here. With trio, put a whole "
    "`with dislock.lock(...)` block into a function: await trio.to_thread.run_sync(function)"
)
REMEDY = "locks for asyncio need greenlet: pip install 'celery-dislock[asyncio]'"


class Call:
    """
    A call of blocking code on an event loop.

    Args:
        task: The asyncio task that awaits the call.
        loop: The event loop.

    Attributes:
        task, loop: The arguments of these names.
        waits_for: What the task must await for the call to go on; None: the call has ended.
        stopped_by: The exception that stopped the call, such as a cancellation: it cannot wait any
            more.
    """

    def __init__(self, task: asyncio.Task[Any], loop: asyncio.AbstractEventLoop) -> None:
        self.task = task
        self.loop = loop
        self.waits_for: Awaitable[Any] | None = None
        self.stopped_by: BaseException | None = None
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Call the function, and keep its result or its exception."""
        try:
            self._result = function(*args, **kwargs)
        except BaseException as exc:  # noqa: BLE001 -- outcome() raises it
            self._error = exc
        self.waits_for = None

    def outcome(self) -> Any:
        """Return what the function has returned; raise what it has raised."""
        if self._error is None:
            return self._result
        error, self._error = self._error, None  # error, traceback and this would form a cycle
        try:
            raise error
        finally:
            del error


def call_of(greenlet: Any) -> Call | None:
    """Return the call that a greenlet runs; None: it runs none."""
    return getattr(greenlet, "dislock_call", None)


def current_call() -> Call | None:
    """Return the call that runs here; None: this code does not run for an event loop."""
    return getattr(current_greenlet(), "dislock_call", None)


async def run_on_loop(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """
    Call a function that waits by the driver of event loops, and await what it waits for.

    A cancellation is raised in the function, where that waits.  From then on the function cannot
    wait any more: each attempt raises the cancellation again.  So a cancellation takes effect at
    once, and the watchdog sends what the lock server must still be told.

    Raises:
        ImportError: greenlet is not installed.
        RuntimeError: No asyncio task runs here.
    """
    runs, call = _begin(function, args, kwargs)
    waiting = vars(_here).setdefault("waiting", {}).setdefault(call.loop, set())
    waiting.add(call)
    try:
        while call.waits_for is not None:
            try:
                result = await call.waits_for
            except BaseException as exc:  # noqa: BLE001 -- it is raised in the function
                runs.throw(exc)
            else:
                runs.switch(result)
    finally:
        waiting.discard(call)
    returned: T = call.outcome()
    return returned


def run_at_once(function: Callable[[], T]) -> T:
    """
    Call a function that need not wait, for the asyncio task that runs here.

    Raises:
        ImportError, RuntimeError: As for :func:`run_on_loop`.
    """
    returned: T = _begin(function, (), {})[1].outcome()
    return returned


def _begin(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Call]:
    """Call a function in a greenlet, until it has ended or waits; return both."""
    require_greenlet()
    task = task_here()
    call = Call(task, task.get_loop())
    _end_calls_of_closed_loops()
    idle = vars(_here).setdefault("idle", [])
    runs = idle.pop() if idle else greenlet(_run_calls)
    here = current_greenlet()
    runs.parent, runs.dislock_call = here, call
    runs.gr_context = here.gr_context  # context variables are those of the task
    runs.switch(function, args, kwargs)
    return runs, call


# Of a thread: greenlets that run no call, as to start one costs 30 us, and the calls of each loop.
_here = threading.local()


def _end_calls_of_closed_loops() -> None:
    """
    End the tasks of this thread that have a call, and whose event loop was closed.

    They can never go on.  The garbage collector would end them so, but it does not look into a
    greenlet that waits, and keeps what that refers to: the task, and its connection.
    """
    waiting = vars(_here).get("waiting", {})
    for loop in [loop_of_waiter for loop_of_waiter in waiting if loop_of_waiter.is_closed()]:
        for call in list(waiting.pop(loop, ())):
            with suppress(Exception, asyncio.CancelledError):  # nobody waits for that task
                call.task.get_coro().close()


if hasattr(os, "register_at_fork"):  # a child ends no call of its parent
    os.register_at_fork(after_in_child=lambda: vars(_here).pop("waiting", None))


def _run_calls(*called: Any) -> None:
    """Run one call after the other; a greenlet ends with its thread."""
    here = current_greenlet()
    while True:
        here.dislock_call.run(*called)
        called, here.dislock_call, here.gr_context = (), None, None  # nothing is kept alive
        _here.idle.append(here)
        called = here.parent.switch()


def wait_for(waits_for: Awaitable[T]) -> T:
    """
    Have the coroutine that awaits this call await something; return the result.

    Raises:
        ConnectionError: No call of :func:`run_on_loop` runs here.
        BaseException: What has stopped the call.
    """
    here = current_greenlet()
    call = call_of(here)
    if call is None or call.stopped_by is not None:
        if isinstance(waits_for, Coroutine):
            waits_for.close()
        if call is None or call.stopped_by is None:
            raise ConnectionError("it belongs to an event loop")
        raise call.stopped_by
    call.waits_for = waits_for
    try:
        result: T = here.parent.switch()
    except BaseException as exc:
        if not isinstance(exc, Exception):
            call.stopped_by = exc
        raise
    return result


def task_here() -> asyncio.Task[Any]:
    """
    Return the asyncio task that runs here.

    Raises:
        RuntimeError: None does.
    """
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs here
        task = None
    if task is None:
        raise RuntimeError(NO_TASK)
    return task


def wait_again() -> None:
    """Let the call that runs here wait again, after a cancellation that was taken back."""
    call = current_call()
    if call is not None:
        call.stopped_by = None


def sleep(seconds: float) -> None:
    """Sleep; on an event loop others run meanwhile."""
    if current_call() is None:
        time.sleep(seconds)
    else:
        wait_for(asyncio.sleep(seconds))


def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Call a function that may block; on an event loop, in a thread, while others run."""
    if current_call() is None:
        return function(*args)
    return wait_for(asyncio.to_thread(function, *args))


def require_greenlet() -> None:
    """
    Check that functions can be run on an event loop.

    Raises:
        ImportError: greenlet is not installed.
    """
    if greenlet is None:
        raise ImportError(REMEDY)
