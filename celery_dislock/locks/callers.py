"""The calling thread, greenlet or asyncio task, and the leases that it has.

In plain Python a thread owns the locks that it takes.  In a greenlet, the greenlet owns them, and
in a coroutine, the asyncio task.  The lease of a task's execution is also recorded here while the
body runs, so that no thread waits for a lock that only the same thread could release.

The record of a thread is in its thread-local storage, that of a greenlet or an asyncio task in a
weak dictionary.  It is dropped when the thread, greenlet or task ends.  A lease has a weak
reference to its caller.  Through this reference the watchdog notices that the caller has ended and
that nobody can release the lease.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary, ref

from celery_dislock.exceptions import LockHeldError, LockTermsError
from celery_dislock.servers.bridge import call_of, current_greenlet

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Collection, Iterator

    from celery_dislock.config.options import TaskOptions
    from celery_dislock.locks.lease import Lease
    from celery_dislock.locks.lock import Lock
    from celery_dislock.locks.running import Running

    Kind = Literal["thread", "greenlet", "task"]

TIMING = {"lock_expire", "lock_watchdog_timeout", "max_renew_times"}


@dataclass(slots=True, eq=False)
class CallerLease:
    """
    A lease that a caller has, and its acquisitions.

    Args:
        lock: The lock.
        lease: The lease.
        runtime: The runtime of a lock in plain Python.  It makes a new store after it was closed.
        execution: Whether this is the lease of a task's execution, which ends with the body.

    Attributes:
        entries: One key per acquisition that is not released yet.  For a ``with`` block the value
            is true: often a weak reference that releases the acquisition if the interpreter drops
            the block.
        running: The ``with`` block that is interrupted when the lease is lost; None: no block is.
        block: The acquisition of that block.
        caller: Who has the lease.
    """

    lock: Lock
    lease: Lease
    runtime: object = None
    execution: bool = False
    entries: dict[object, object] = field(default_factory=dict)
    running: Running | None = None
    block: object = None
    caller: ref[Caller] | None = None

    def is_of(self, lock: Lock, runtime: object = None) -> bool:
        """
        Return whether the lease has exactly the keys of *lock*, on the same store.

        If *runtime* is given, any store of that runtime will do: a lease that was taken before the
        runtime was closed can still be released.
        """
        ours = self.lock.store is lock.store or (runtime is not None and runtime is self.runtime)
        return ours and tuple(self.lock.names) == tuple(lock.names)

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
        pid: The process that made this record; a forked child does not have its leases.
        entering: Weak reference to the :class:`Leaving` of the ``with`` statement whose
            ``__enter__`` runs next.
    """

    def __init__(self, kind: Kind = "thread", one: Any = None) -> None:
        self.entering: Any = None
        self.kind = kind
        self.thread = threading.current_thread()
        self.pid = os.getpid()
        self._one = None if one is None else ref(one)
        self._leases: list[CallerLease] = []  # a task's comes after that of an eager task around it

    @property
    def name(self) -> str:
        """The name of the thread; of a task, also its own."""
        task = self._one() if self._one is not None and self.kind == "task" else None
        return self.thread.name if task is None else f"{self.thread.name}, {task.get_name()}"

    @property
    def dead(self) -> bool:
        """Whether it has ended; unknown for a thread that :mod:`threading` did not start."""
        if self._one is None:
            return not self.thread.is_alive()
        one = self._one()
        if one is None or self.kind == "greenlet":
            return one is None or bool(one.dead)
        return bool(one.done() or one.get_loop().is_closed())

    def hold(self, held: CallerLease) -> None:
        """Record a lease of this caller."""
        held.caller = ref(self)
        self._leases.append(held)

    def forget(self, held: CallerLease) -> None:
        """Remove a lease of this caller from the record; a second call does nothing."""
        if held in self._leases:
            self._leases.remove(held)

    def find(self, lock: Lock) -> CallerLease | None:
        """Return this caller's latest lease of one of the lock's keys; None if there is none."""
        return next(self._of(lock), None) if self._leases else None

    def refuse_to_wait(self, lock: Lock) -> None:
        """
        Raise an error if the caller would wait for itself.

        Raises:
            LockHeldError: This caller has a lease of one of the keys.
        """
        for held in self._of(lock) if self._leases else ():
            if held.lease.held:
                keys = dict(zip(lock.names, lock.keys, strict=True))
                key = next(keys[name] for name in lock.names if name in held.lock.names)
                raise LockHeldError(key, self.described(held), held.lease.remaining)
        around = getattr(_threads, "caller", None) if self.kind == "task" else None
        if around is not None:  # who runs the event loop waits for it
            around.refuse_to_wait(lock)

    def _of(self, lock: Lock) -> Iterator[CallerLease]:
        """Return the leases of one of the lock's keys, the latest first."""
        for held in reversed(self._leases.copy()):
            if held.lock.store.server != lock.store.server:
                continue
            if held.lease.finished:
                self.forget(held)  # an exception interrupted the end of this lease
            elif not set(held.lock.names).isdisjoint(lock.names):
                yield held

    def described(self, held: CallerLease) -> str:
        """Return a text for messages that names this caller as the holder of a lease."""
        if held.execution:
            return "the task that is running here"
        return "this very " + ("asyncio task" if self.kind == "task" else self.kind)


_threads = threading.local()
_others: WeakKeyDictionary[Any, Caller] = WeakKeyDictionary()  # by greenlet or task


def current_caller() -> Caller:
    """Return the record of the calling thread, greenlet or asyncio task."""
    here = current_greenlet()
    if here is None or here.parent is None:  # the first greenlet of a thread has none
        return _record("thread", None)
    call = call_of(here)
    return _record("greenlet", here) if call is None else _record("task", call.task)


def caller_of(task: asyncio.Task[Any]) -> Caller:
    """Return the record of an asyncio task."""
    return _record("task", task)


def _record(kind: Kind, one: Any) -> Caller:
    caller = getattr(_threads, "caller", None) if one is None else _others.get(one)
    if caller is None or caller.pid != os.getpid():  # of the parent, before a fork
        caller = Caller(kind, one)
        if one is None:
            _threads.caller = caller
        else:
            _others[one] = caller
    return caller


def has_ended(caller: ref[Caller]) -> bool:
    """Return whether a thread, greenlet or task has ended."""
    alive = caller()
    return alive is None or alive.dead


def check_terms(
    held: CallerLease, asked: TaskOptions, caller: Caller, stated: Collection[str] = ()
) -> None:
    """
    Check that the caller can take a lock again that it already holds.

    A task's lease lasts as long as its body.  Options about the lease's duration are therefore
    compared with a task's lease only if they are *stated*.

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
        names.insert(1, "lock_limit")
    if has.lock_expire is None and asked.lock_expire is None:
        names += ["lock_watchdog_timeout", "max_renew_times"]
    if asked.lock_on_lost != "warn":
        names.append("lock_on_lost")
    differing = [name for name in names if getattr(has, name) != getattr(asked, name)]
    if not has.admits_several:
        if asked.lock_mode == "shared" and "lock_mode" in differing:
            differing.remove("lock_mode")  # who is alone may read as well
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
