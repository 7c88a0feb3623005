"""Which thread or greenlet is calling, and which leases it has.

In plain Python a thread owns the locks that it takes; inside a greenlet, that greenlet does.  The
execution of a task is known here too, for as long as its body runs, so that nobody waits for a
lock that only the waiting thread could release.

What a thread has is kept in its thread-local storage, and goes with the thread; what a greenlet
has goes with the greenlet.  A lease refers to its caller weakly, and asks it whether it has ended:
that is how the watchdog notices that nobody is left to release it.
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
    A lease that a caller has, and each time that it was taken.

    Args:
        lock: The lock.
        attempt: The attempt by which it was taken.
        lease: The lease.
        runtime: What took it in plain Python; it makes a new store when it was closed.
        execution: Whether it is the lease of a task's execution, which ends with the body.

    Attributes:
        entries: One key for each time that it was taken and not released; for a ``with`` block
            with what undoes that when the interpreter drops the block.
        running: The ``with`` block that is stopped when the lease is lost; None: nothing is.
        caller: Who has it.
        outer: What the caller had of its keys before: of a task, in which this one runs eagerly.
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
        """Tell whether it is a lease of this very lock, all of its keys and no others."""
        return self.lock.store is lock.store and tuple(self.lock.names) == tuple(lock.names)

    def leave(self, entry: object) -> None:
        """
        Undo one acquisition; with the last, release the lease.

        May be repeated where an exception that a signal handler raised has cut it short.
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
        entering: What the ``with`` statement will call whose ``__enter__`` runs just now.
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
        """Whether it is a greenlet, and not a thread."""
        return self._greenlet is not None

    @property
    def dead(self) -> bool:
        """Whether it has ended; not known of a thread that :mod:`threading` did not start."""
        if self._greenlet is None:
            return not self._thread.is_alive()
        greenlet = self._greenlet()
        return greenlet is None or greenlet.dead

    def hold(self, held: Held) -> None:
        """Note a lease that this caller has."""
        held.caller = ref(self)
        for place in _places(held.lock):
            if place in self._held:
                held.outer[place] = self._held[place]
            self._held[place] = held

    def forget(self, held: Held) -> None:
        """Note that it has the lease no more; does nothing the second time."""
        for place in _places(held.lock):
            if self._held.get(place) is held:
                outer = held.outer.get(place)
                if outer is not None and not outer.lease.finished:
                    self._held[place] = outer
                else:
                    self._held.pop(place, None)

    def find(self, lock: Lock) -> Held | None:
        """Return what it has of this lock, or of one of its keys; None where it has nothing."""
        for place in _places(lock):
            held = self._held.get(place)
            if held is not None:
                if not held.lease.finished:
                    return held
                self.forget(held)  # its end was cut short just before
        return None

    def refuse_to_wait(self, lock: Lock) -> None:
        """
        Refuse a wait that only this caller itself could end.

        Raises:
            LockHeldError: It has a lease of one of the keys.
        """
        for place, key in zip(_places(lock), lock.keys, strict=True):
            held = self._held.get(place)
            if held is not None and held.lease.held:
                raise LockHeldError(key, self.described(held), held.lease.remaining)

    def described(self, held: Held) -> str:
        """Say who has a lease, for a message."""
        if held.execution:
            return "the task that is running here"
        return "this very greenlet" if self.is_greenlet else "this very thread"

    def owned_here(self) -> bool:
        """Tell whether this is of the process that runs, and not of one that was forked."""
        return self._pid == os.getpid()


_threads = threading.local()
_greenlets: WeakKeyDictionary[Any, Caller] = WeakKeyDictionary()


def current_caller() -> Caller:
    """Return the thread or greenlet that calls."""
    greenlets: Any = sys.modules.get("greenlet")
    here = greenlets.getcurrent() if hasattr(greenlets, "getcurrent") else None
    if here is not None and here.parent is not None:  # the first greenlet of a thread has none
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
    Check that a lock which is held can be taken once more on the terms asked for.

    A task's lease lasts as long as its body, so how long it lasts matters only if it was *stated*.

    Args:
        held: The lease that the caller has.
        asked: The options asked for.
        caller: Who asks.
        stated: Names of the options that were given, and are not defaults.

    Raises:
        LockTermsError: It cannot: an upgrade from shared to exclusive, or other terms.
    """
    lease, has = held.lease, held.lock.options
    differing = [
        (name.removeprefix("lock_"), there, here)
        for name, there, here in _differences(has, asked)
        if (
            (name in stated or name not in TIMING or not held.execution)
            and (name, there, here) != ("lock_mode", "exclusive", "shared")
        )
        or has.lock_limit > 1
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


def _places(lock: Lock) -> list[tuple[str, str]]:
    server = lock.store.server
    return [(server, name) for name in lock.names]
