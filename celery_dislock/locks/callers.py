"""The calling thread or greenlet, and the leases that it has.

In plain Python a thread owns the locks that it takes.  In a greenlet, the greenlet owns them.  The
lease of a task's execution is also recorded here while the body runs, so that no thread waits for a
lock that only the same thread could release.

The record of a thread is in its thread-local storage, and the record of a greenlet is in a weak
dictionary.  Both are dropped when the thread or greenlet ends.  A lease has a weak reference to its
caller.  Through this reference the watchdog notices that the caller has ended and that nobody can
release the lease.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from celery_dislock.exceptions import LockHeldError, LockTermsError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from celery_dislock.config.options import TaskOptions
    from celery_dislock.locks.attempt import Attempt
    from celery_dislock.locks.lease import Lease
    from celery_dislock.locks.lock import Lock
    from celery_dislock.locks.running import Running


class Held:
    """
    A lease that a caller has, and its acquisitions.

    Args:
        lock: The lock.
        attempt: The attempt that took the lock.
        lease: The lease.
        runtime: The runtime of a lock in plain Python.  It makes a new store after it was closed.
        execution: Whether this is the lease of a task's execution, which ends with the body.

    Attributes:
        entries: One key per acquisition that is not released yet.  For a ``with`` block the value
            is a weak reference that releases the acquisition if the interpreter drops the block.
        running: The ``with`` block that is interrupted when the lease is lost; None: no block is.
        caller: The thread or greenlet that has the lease.
        outer: Leases that the caller had before for the same keys.  They belong to a task inside
            which this one runs eagerly.
    """

    __slots__ = (
        "_attempt",
        "caller",
        "entries",
        "execution",
        "lease",
        "lock",
        "outer",
        "running",
        "runtime",
    )

    def __init__(
        self,
        lock: Lock,
        attempt: Attempt,
        lease: Lease,
        *,
        runtime: object = None,
        execution: bool = False,
    ) -> None:
        self.lock = lock
        self.lease = lease
        self.runtime = runtime
        self.execution = execution
        self.entries: dict[object, object] = {}
        self.running: Running | None = None
        self.caller: ref[Caller] | None = None
        self.outer: dict[tuple[str, str], Held] = {}
        self._attempt = attempt

    def is_of(self, lock: Lock) -> bool:
        """Return whether the lease is on the same store and has exactly the keys of *lock*."""
        if lock is self.lock:
            return True
        return self.lock.store is lock.store and tuple(self.lock.names) == tuple(lock.names)

    def leave(self, entry: object) -> None:
        """
        Undo one acquisition; after the last one, release the lease.

        The call can be repeated if a signal handler's exception has interrupted it.
        """
        self.entries.pop(entry, None)
        if self.entries or self.execution:
            return
        try:
            if self.running is not None:
                self.running.end()
            self._attempt.end()
        finally:
            caller = self.caller() if self.caller is not None else None
            if caller is not None:
                caller.forget(self)


class Caller:
    """
    A thread or a greenlet.

    Attributes:
        entering: Weak reference to the :class:`Leaving` of the ``with`` statement whose
            ``__enter__`` runs next.
    """

    __slots__ = ("__weakref__", "_greenlet", "_held", "_pid", "_thread", "entering")

    def __init__(self, greenlet: Any = None) -> None:
        self.entering: Any = None
        self._greenlet = None if greenlet is None else ref(greenlet)
        self._thread = threading.current_thread()
        self._held: dict[tuple[str, str], Held] = {}
        self._pid = os.getpid()

    @property
    def is_greenlet(self) -> bool:
        """Whether the caller is a greenlet, not a thread."""
        return self._greenlet is not None

    @property
    def dead(self) -> bool:
        """Whether it has ended; unknown for a thread that :mod:`threading` did not start."""
        if self._greenlet is None:
            return not self._thread.is_alive()
        greenlet = self._greenlet()
        return greenlet is None or greenlet.dead

    def hold(self, held: Held) -> None:
        """Record a lease of this caller."""
        held.caller = ref(self)
        server = held.lock.store.server
        for name in held.lock.names:
            place = server, name
            if place in self._held:
                held.outer[place] = self._held[place]
            self._held[place] = held

    def forget(self, held: Held) -> None:
        """Remove a lease of this caller from the record; a second call does nothing."""
        server = held.lock.store.server
        for name in held.lock.names:
            place = server, name
            if self._held.get(place) is held:
                outer = held.outer.get(place)
                if outer is not None and not outer.lease.finished:
                    self._held[place] = outer
                else:
                    self._held.pop(place, None)

    def find(self, lock: Lock) -> Held | None:
        """Return this caller's lease of one of the lock's keys; None if there is none."""
        server = lock.store.server
        for name in lock.names:
            held = self._held.get((server, name))
            if held is not None:
                if not held.lease.finished:
                    return held
                self.forget(held)  # an exception interrupted the end of this lease
        return None

    def refuse_to_wait(self, lock: Lock) -> None:
        """
        Raise an error if the caller would wait for itself.

        Raises:
            LockHeldError: This caller has a lease of one of the keys.
        """
        server = lock.store.server
        for name, key in zip(lock.names, lock.keys, strict=True):
            held = self._held.get((server, name))
            if held is not None and held.lease.held:
                raise LockHeldError(key, self.described(held), held.lease.remaining)

    def described(self, held: Held) -> str:
        """Return a text for messages that names this caller as the holder of a lease."""
        if held.execution:
            return "the task that is running here"
        return "this very greenlet" if self.is_greenlet else "this very thread"

    def owned_here(self) -> bool:
        """Return whether this record was made in this process, not in the parent before a fork."""
        return self._pid == os.getpid()


_threads = threading.local()
_greenlets: WeakKeyDictionary[Any, Caller] = WeakKeyDictionary()


def current_caller() -> Caller:
    """Return the record of the calling thread or greenlet."""
    greenlets: Any = sys.modules.get("greenlet")
    here = greenlets.getcurrent() if hasattr(greenlets, "getcurrent") else None
    if here is not None and here.parent is not None:  # the first greenlet of a thread has no parent
        caller = _greenlets.get(here)
        if caller is None or not caller.owned_here():
            caller = _greenlets[here] = Caller(here)
        return caller
    caller = getattr(_threads, "caller", None)
    if caller is None or not caller.owned_here():
        caller = _threads.caller = Caller()
    return caller


def check_terms(
    held: Held, asked: TaskOptions, caller: Caller, stated: Collection[str] = ()
) -> None:
    """
    Check that the caller can take a lock again that it already holds.

    A task's lease lasts as long as its body.  Options about the lease's duration are therefore
    compared with a task's lease only if they are *stated*.

    Args:
        held: The lease that the caller has.
        asked: The requested options.
        caller: The calling thread or greenlet.
        stated: Names of the options that were given explicitly.

    Raises:
        LockTermsError: The request is an upgrade from shared to exclusive, or has other terms.
    """
    lease, has = held.lease, held.lock.options
    differing = [
        (name.removeprefix("lock_"), there, here)
        for name, there, here in _differences(has, asked)
        if (
            (name in stated or name not in TIMING or not held.execution)
            and (name, there, here) != ("lock_mode", "exclusive", "shared")
        )
        or has.admits_several
    ]
    if differing:
        raise LockTermsError(
            lease.key,
            caller.described(held),
            lease.remaining,
            ", ".join(f"{name}={there!r}" for name, there, _ in differing),
            ", ".join(f"{name}={here!r}" for name, _, here in differing),
        )


TIMING = ("lock_expire", "lock_watchdog_timeout", "max_renew_times")


def _differences(has: TaskOptions, asked: TaskOptions) -> Iterator[tuple[str, Any, Any]]:
    names = ["lock_mode", "lock_expire"]
    if has.lock_mode == asked.lock_mode:
        names.insert(1, "lock_limit")
    if has.lock_expire is None and asked.lock_expire is None:
        names += ["lock_watchdog_timeout", "max_renew_times"]
    if asked.lock_on_lost != "warn":
        names.append("lock_on_lost")
    for name in names:
        there, here = getattr(has, name), getattr(asked, name)
        if there != here:
            yield name, there, here
