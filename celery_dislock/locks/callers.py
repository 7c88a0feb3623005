"""The calling thread, greenlet or asyncio task, and the leases that it has taken.

A lease can be taken again by code that runs inside the block that holds it.  Two things show that:
the code runs in the thread, greenlet or asyncio task that entered the block, and in a context that
the block has marked (:mod:`contextvars`).  Neither is enough.  A thread pool enters a block in one
thread, leaves it in another, and runs other work in the first one meanwhile; a context is copied to
work that runs beside the block.  If two jobs of a pool share the context of their thread, the job
tells them apart.  Code of which this is not sure counts as outside.

The lease of a task's execution is also recorded here while the body runs, so that no thread waits
for a lock that only the same thread could release.

The record of a thread is in its thread-local storage, that of a greenlet or an asyncio task in a
weak dictionary.  The record is dropped when the thread, greenlet or task ends.  The lease may live
on: its block may end elsewhere, and the lock object that took it can release it.  A lease has weak
references to its caller and to the record of its acquisitions.  Through them the watchdog notices
that nobody can release the lease any more.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from asyncio import _get_running_loop
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary, ref

from celery_dislock.exceptions import LockHeldError, LockTermsError
from celery_dislock.keys.names import body_owner, shown_id
from celery_dislock.keys.templates import key_of
from celery_dislock.locks.lease import Attempt, current
from celery_dislock.servers.bridge import call_of, current_greenlet
from celery_dislock.servers.records import describe, write_holder

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from types import FrameType

    from celery_dislock.config.options import TaskOptions
    from celery_dislock.locks.interruption import Running
    from celery_dislock.locks.lease import Lease
    from celery_dislock.locks.lock import Lock
    from celery_dislock.locks.runtime import Process

    Kind = Literal["thread", "greenlet", "task"]

THREADS = 1000  # threads and greenlets whose description is kept
TIMING = {"lock_expire", "lock_watchdog_timeout", "max_renew_times"}

# Functions that run the jobs of thread pools, and their local variables that no two jobs share.
JOBS = {
    ("concurrent.futures.thread", "run"): ("self",),
    ("multiprocessing.pool", "worker"): ("job", "i"),
    ("gevent.threadpool", "__run_task"): ("thread_result",),
    ("eventlet.tpool", "tworker"): ("e",),
}
# Arguments of WorkerContext.run(), of Python 3.14: it bears a name of JOBS, and is its thread's.
OF_A_THREAD = ("self", "task")

# The leases in whose blocks a context runs.  Weak: a context may live on, and releases nothing.
_around: ContextVar[tuple[ref[CallerLease], ...]] = ContextVar("dislock_around", default=())

logger = logging.getLogger("celery_dislock")


HINT = (
    "{} has entered it and not left it: only code inside that block, in its context, may "
    "take it again. It is free when the block ends, or the lock object that took it is released"
)


@dataclass(eq=False)
class CallerLease:
    """
    A lease that a caller has, and its acquisitions.

    Args:
        lock: The lock.
        lease: The lease.
        runtime: The runtime of a lock in plain Python; it has another store after it was closed.
        execution: Whether this is the lease of a task's execution, which ends with the body.

    Attributes:
        entries: One key per acquisition that is not released yet.  The value identifies the
            ``with`` block, and is 0 for a call of ``acquire()``.
        running: The ``with`` block that is interrupted when the lease is lost; None: no block is.
        block: The key in *entries* of that block's acquisition.
        caller: The caller that has taken the lease.
        job: The job of a thread pool in which the lease was taken; empty: in none.
    """

    lock: Lock
    lease: Lease
    runtime: object = None
    execution: bool = False
    entries: dict[object, object] = field(default_factory=dict)
    running: Running | None = None
    block: object = None
    caller: ref[Caller] | None = None
    job: Sequence[object] = ()

    def is_of(self, lock: Lock, runtime: object = None) -> bool:
        """
        Return whether the lease has exactly the keys of *lock*, in any order, on its store.

        If *runtime* is given, any store of that runtime will do: a lease that was taken before the
        runtime was closed can still be released.
        """
        ours = self.lock.store is lock.store or (runtime is not None and runtime is self.runtime)
        return ours and {*self.lock.names} == {*lock.names}

    def leave(self, entry: object) -> None:
        """
        Undo one acquisition; after the last one, release the lease.

        The call can be repeated if a signal handler's exception has interrupted it.
        """
        self.entries.pop(entry, None)
        if self.running is not None and (entry is self.block or not self.entries):
            self.running.end()
            self.running = None
        if self.entries or self.execution:
            return
        try:
            self.lease.release()
        finally:
            caller = self.caller() if self.caller is not None else None
            if caller is not None:
                caller.forget(self)


class Caller:
    """
    A thread, a greenlet or an asyncio task.

    Args:
        kind: Which of them.
        one: The greenlet or the task; None: the thread.

    Attributes:
        kind: The argument of that name.
        thread: The thread; of a greenlet, what :mod:`threading` takes for one.
        is_main: Whether that is the main thread, which runs no jobs of a pool.
        label: What follows the thread's name in messages: the name of a task.
        itself: How messages to this caller name it.
        pid: The process that made this record; a forked child does not have its leases.
        leases: The leases that it has, in the order in which they were taken.  The lease of an
            eager task comes after that of the task that runs it.
    """

    def __init__(self, kind: Kind = "thread", identity: Any = None) -> None:
        self.leases: list[CallerLease] = []
        self.kind = kind
        self.thread = threading.current_thread()
        self.is_main = self.thread is threading.main_thread()
        self.label: str = f", {identity.get_name()}" if kind == "task" else ""
        self.itself = f"this very {'asyncio task' if kind == 'task' else kind}"
        self.pid = os.getpid()
        self._identity = None if identity is None else ref(identity)

    @property
    def dead(self) -> bool:
        """Whether it has ended; unknown for a thread that :mod:`threading` did not start."""
        if self._identity is None:
            return not self.thread.is_alive()
        identity = self._identity()
        if identity is None or self.kind == "greenlet":
            return identity is None or bool(identity.dead)
        return bool(identity.done() or identity.get_loop().is_closed())

    def hold(self, held: CallerLease) -> None:
        """Record a lease of this caller, and mark the context in which it was taken."""
        held.caller = ref(self)
        held.job = () if self.is_main else _job_here()
        if not held.execution:
            elsewhere = None if self.kind == "task" else ref(held)
            held.lease.caller_ended = partial(nobody_is_left, ref(self), elsewhere)
        around = _around.get()
        if around:  # drop the marks of blocks that have ended in another context
            around = tuple([mark for mark in around if mark() is not None])
        _around.set((*around, ref(held)))
        self.leases.append(held)

    def is_inside(self, held: CallerLease) -> bool:
        """Return whether the caller's code that runs here runs inside the block of a lease."""
        if not any(mark() is held for mark in _around.get()):
            return False
        return held.job == (() if self.is_main else _job_here())

    def end_body(self, begun: int) -> None:
        """
        End blocks that the body of a task has not ended, as an exception struck at their end.

        Args:
            begun: How many leases this caller had before the body began.
        """
        for held in self.leases[begun:]:
            if held.execution:
                self.forget(held)
            for entry, block in list(held.entries.items()):
                if block:
                    held.leave(entry)

    def forget(self, held: CallerLease) -> None:
        """Remove a lease of this caller from the record; a second call does nothing."""
        if held in self.leases:
            self.leases.remove(held)
        around = _around.get()
        if around and around[-1]() is held:
            _around.set(around[:-1])

    def find(self, lock: Lock) -> CallerLease | None:
        """Return the latest lease of one of the lock's keys whose block runs here; None: none."""
        return next((held for held in self._of(lock) if self.is_inside(held)), None)

    def hint(self, lock: Lock) -> str:
        """
        Return a text for messages if this caller has entered the lock; empty if not.

        It has a lease of one of the keys then, and runs outside of that lease's block.
        """
        has_entered = any(held.lease.held and not self.is_inside(held) for held in self._of(lock))
        return HINT.format(self.itself) if has_entered else ""

    def refuse_to_wait(self, lock: Lock) -> None:
        """
        Raise an error if the caller would wait for itself.

        Raises:
            LockHeldError: The code that asks runs in a block that holds one of the keys.
        """
        for held in self._of(lock):
            if self.is_inside(held) and held.lease.held:
                key = next(key_of(name) for name in lock.names if name in held.lock.names)
                about = {"holder": dict(held.lease.holder), "owner": held.lease.owner}
                raise LockHeldError(key, self.described(held), held.lease.remaining, about=about)
        around = getattr(_threads, "caller", None) if self.kind == "task" else None
        if around is not None:  # this thread runs the event loop, and would wait for it
            around.refuse_to_wait(lock)

    def _of(self, lock: Lock) -> Iterator[CallerLease]:
        """Return the leases of one of the lock's keys, the latest first."""
        for held in reversed(self.leases.copy()):
            if held.lock.store.server != lock.store.server:
                continue
            if held.lease.finished:
                self.forget(held)  # an exception interrupted the end of this lease
            elif not set(held.lock.names).isdisjoint(lock.names):
                yield held

    def described(self, held: CallerLease) -> str:
        """Return a text for messages that names this caller as the holder of a lease."""
        return "the task that is running here" if held.execution else self.itself


_threads = threading.local()
_others: WeakKeyDictionary[Any, Caller] = WeakKeyDictionary()  # by greenlet or task


def current_caller() -> Caller:
    """Return the record of the calling thread, greenlet or asyncio task."""
    here = current_greenlet()
    if here is not None and here.parent is not None:  # the first greenlet of a thread has none
        call = call_of(here)
        return _record("greenlet", here) if call is None else caller_of(call.task)
    caller: Caller | None = getattr(_threads, "caller", None)
    if caller is None or caller.pid != os.getpid():  # of the parent, before a fork
        caller = _threads.caller = Caller()
    return caller


def caller_of(task: asyncio.Task[Any]) -> Caller:
    """Return the record of an asyncio task."""
    return _record("task", task)


def _record(kind: Kind, identity: Any) -> Caller:
    caller = _others.get(identity)
    if caller is None or caller.pid != os.getpid():
        caller = _others[identity] = Caller(kind, identity)
    return caller


def attempt_of(caller: Caller, process: Process, lock: Lock, sender: object) -> Attempt:
    """
    Make a caller's attempt to take a lock.

    In the body of a task the lock is the task's: its owner and holder have the task's id.
    """
    timeout = None if lock.interval is None else lock.timeout
    thread = caller.thread.name + caller.label
    start, holder, text = _described(
        process.host, process.pid, caller.thread.ident, thread, timeout
    )
    running, around = process.running(on_loop=caller.kind == "task"), current.get()
    lease = None if around is None else around.lease
    if running is None and lease is not None and not lease.finished:  # a thread in its context
        running = lease.holder["task"], lease.holder["id"], lease.holder["worker"]
    if running is None:
        return Attempt(process.owner_name(start), holder, sender, text)
    task, task_id, worker = running
    who = {"task": task, "id": shown_id(task_id), "host": process.host}
    owner = body_owner(task_id, process.owner_name(""), start)
    return Attempt(owner, describe(who, worker, process.pid, timeout), sender)


@lru_cache(THREADS)
def _described(
    host: str, pid: int, ident: int | None, thread: str, timeout: float | None
) -> tuple[str, Mapping[str, Any], str]:
    """Return the start of the owners' names, and the holder, also as JSON."""
    holder = describe({"thread": thread}, host, pid, timeout)
    return f"{host}:{pid}:{ident}/", holder, write_holder(holder)


def an_event_loop_runs() -> bool:
    """Return whether an event loop runs in this thread, which a blocking call would stop."""
    if _get_running_loop() is not None:
        return True
    trio: Any = sys.modules.get("trio.lowlevel")
    current_task = getattr(trio, "current_task", None)
    if current_task is None:
        return False
    try:
        current_task()
    except RuntimeError:  # trio does not run in this thread
        return False
    return True


def nobody_is_left(caller: ref[Caller], held: ref[CallerLease] | None) -> bool:
    """
    Return whether nobody can release a lease any more.

    Args:
        caller: The thread, greenlet or task that has taken it.
        held: The record of the lease.  A block that holds the lease may go on elsewhere, and the
            lock object that took it may release it: both refer to the record.  None: only the
            caller counts.
    """
    alive = caller()
    if alive is not None:
        if not alive.dead:
            return False
        alive.leases.clear()  # now only blocks and lock objects keep the records alive
    return held is None or held() is None


def _job_here() -> Sequence[object]:
    """Return what identifies the job of a thread pool that runs here; empty: none does."""
    for frame in _frames():
        code = frame.f_code
        names = JOBS.get((frame.f_globals.get("__name__", ""), code.co_name))
        if names is not None and code.co_varnames[: code.co_argcount] != OF_A_THREAD:
            found = frame.f_locals
            job = [_weakly(found[name]) for name in names]
            if isinstance(found, dict):  # a copy, which would keep alive what the job has
                found.clear()
            return job
    return ()


def _weakly(value: object) -> object:
    try:
        return ref(value)
    except TypeError:
        return value


def _frames() -> Iterator[FrameType]:
    """Return the frames of the caller, also those around a greenlet."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 -- CPython's, as inspect uses it
    here = current_greenlet()
    while frame is not None:
        yield frame
        frame = frame.f_back
        if frame is None and here is not None:
            here = here.parent
            frame = here and here.gr_frame


def check_terms(
    held: CallerLease, asked: TaskOptions, caller: Caller, stated: Collection[str] = ()
) -> None:
    """
    Check that the caller can take a lock again that it already holds.

    A task's lease lasts as long as its body.  Options about the lease's duration are therefore
    compared with a task's lease only if they are *stated*.  So is what the task's arguments may
    have told: the cost, and a limit or a rate from a callable.

    Args:
        held: The lease that the caller has.
        asked: The requested options.
        caller: Who asks.
        stated: Names of the options that were given explicitly.

    Raises:
        LockTermsError: The request is an upgrade from shared to exclusive, or has other terms.
    """
    lease, has = held.lease, held.lock.options
    names = ["lock_mode", "lock_expire"]
    if has.lock_mode == asked.lock_mode:
        names[1:1] = [
            name
            for name in ("lock_limit", "lock_rate", "lock_cost")
            if name in stated or not (name == "lock_cost" or callable(getattr(has, name)))
        ]
    if has.lock_expire is None and asked.lock_expire is None:
        names += ["lock_watchdog_timeout", "max_renew_times"]
    if asked.lock_on_lost != "warn":
        names.append("lock_on_lost")
    if asked.lock_on_cancel is not None:
        names.append("lock_on_cancel")
    differing = [name for name in names if getattr(has, name) != getattr(asked, name)]
    if not has.admits_several:
        if asked.lock_mode == "shared" and "lock_mode" in differing:
            differing.remove("lock_mode")  # exclusive covers shared
        if held.execution:
            differing = [name for name in differing if name in stated or name not in TIMING]
    if differing:
        raise LockTermsError(
            lease.key,
            caller.described(held),
            lease.remaining,
            *(_terms(options, differing) for options in (has, asked)),
        )


def _terms(options: TaskOptions, names: list[str]) -> str:
    return ", ".join(f"{name.removeprefix('lock_')}={getattr(options, name)!r}" for name in names)


@lru_cache(1000)  # keys that are remembered as warned of
def warn_of_wait(key: str, thread: str, hint: str) -> None:
    """Log once that a thread may begin to wait for itself."""
    #: WARNING `… waits without a limit for lock …: this very thread has entered it and not left it:
    #: …`: A thread may wait for itself; once per process and key. -> If it hangs, give the inner
    #: code the lease, or a `timeout`.
    logger.warning(
        "%s waits without a limit for lock %r: %s. If nobody else does that, it waits for itself.",
        *(thread, key, hint),
    )
