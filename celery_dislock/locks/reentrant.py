"""The locks of tasks for plain Python: web views, scripts, and code inside a task's body.

As with :class:`threading.RLock`, a lock can be taken again on the same terms, and must be released
once per acquisition, inside the block that holds it: see ``callers.py``.  All lock objects of a key
share one count, kept in this process.  A lock that the running task holds counts as held by the
code of its body.

Every step that releases something is repeated once if a signal handler's exception interrupts it.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

from celery_dislock.config.plain import of_task
from celery_dislock.config.settings import ONE_BY_ONE, is_cluster
from celery_dislock.config.values import seconds
from celery_dislock.exceptions import (
    EventLoopError,
    LockLostError,
    NotOwnerError,
    SettingsError,
    add_note,
)
from celery_dislock.keys.templates import check_written, keys_of
from celery_dislock.locks.callers import (
    CallerLease,
    an_event_loop_runs,
    attempt_of,
    check_terms,
    current_caller,
    warn_of_wait,
)
from celery_dislock.locks.interruption import Running, why_not_interruptible
from celery_dislock.locks.lease import End
from celery_dislock.locks.lock import Lock
from celery_dislock.servers.records import Conflict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import timedelta
    from types import FrameType, TracebackType

    from celery_dislock.locks.callers import Caller
    from celery_dislock.locks.lease import Lease
    from celery_dislock.locks.runtime import Process, Runtime
    from celery_dislock.servers.view import Holder

MAY_WAIT = seconds(at_least=0)  # check of a maximum wait


class Hold(NamedTuple):
    """
    One acquisition.

    Attributes:
        held: The lease of the caller that made it.
        entry: What identifies it among those of the lease.
        block: What identifies its block; see :attr:`CallerLease.entries`.
    """

    held: CallerLease
    entry: object
    block: object

    @property
    def is_live(self) -> bool:
        """Whether it was not undone yet, by this lock object or by another."""
        return self.entry in self.held.entries


class ReentrantLock:
    """
    A lock for blocking code.  Made by :meth:`celery_dislock.Dislock.lock`.

    Use it in a ``with`` block, which waits for the lock and returns the lease::

        with dislock.lock("export:7") as lease:
            ...
            lease.ensure_held()

    If the lock was lost, the block ends with :class:`~celery_dislock.exceptions.LockLostError`.  If
    the block itself raised another exception, that propagates, with a note about the loss.

    Args:
        runtime: What the app's locks share.
        key: See :meth:`celery_dislock.Dislock.lock`.
        options: The options of :meth:`celery_dislock.Dislock.lock`, by their names.
        on_lost: The value of ``on_lost`` if it is not given.

    Raises:
        SettingsError: An option is unknown, or cannot be used.
        LockKeyError: A key cannot be used, or the list is empty.

    Attributes:
        keys: The keys of the lock.  All of several keys are taken, or none.
    """

    def __init__(
        self,
        runtime: Runtime[Any],
        key: str | Sequence[str],
        options: Mapping[str, Any],
        on_lost: str = "warn",
    ) -> None:
        plain = runtime.plain(key, options, on_lost)
        self._options, self._timeout, self._fair, self._stated, self._stops = plain
        self.keys = (check_written(key),) if isinstance(key, str) else keys_of(key)
        if len(self.keys) > 1 and self._options.has_rate and is_cluster(runtime.conf):
            raise self._refusal("rate", options.get("rate"), ONE_BY_ONE)
        self._runtime = runtime
        self._made: Lock | None = None
        self._own: dict[object, Hold] = {}  # the acquisitions of this object, in order, by entry

    def acquire(
        self,
        blocking: bool = True,  # noqa: FBT001, FBT002 -- as in threading
        timeout: float | timedelta | None = None,
    ) -> bool:
        """
        Take the lock.  Blocks until it is free, *timeout* seconds at most.

        Args:
            blocking: False: do not wait.
            timeout: Maximum seconds to wait, >= 0; None: no limit.

        Returns:
            True if the lock was taken, or taken again inside its block; False if it is held.

        Raises:
            SettingsError: *timeout* is negative or not a number, or was given with
                ``blocking=False``; or the lock has ``on_lost="raise"``, which needs a ``with``
                block.
            LockLostError: This code holds the lock already, and has lost it.
            LockTermsError: This code holds the lock on other terms.
            LockHeldError: This code holds one of the keys through another lock, and would wait
                for itself.
            EventLoopError: An event loop runs in this thread.
            StoreError: The lock server did not answer.  The lock may have been taken.  If so, it
                ends after its timeout at the latest.
        """
        wait_for = None
        if timeout is not None:
            try:
                wait_for = MAY_WAIT(timeout)
            except ValueError as exc:
                remedy = f"{exc}; leave it out to wait without a limit"
                raise self._refusal("timeout", timeout, remedy) from exc
            if not blocking:
                remedy = "it has no effect with blocking=False: leave one of the two out"
                raise self._refusal("timeout", timeout, remedy)
        return isinstance(self._take(object(), 0, blocking=blocking, timeout=wait_for), CallerLease)

    def try_acquire(self) -> Lease | Conflict:
        """
        Take the lock if it is free.  Never waits; one round trip, or none if it is held here.

        Returns:
            The lease, or the conflict, which is falsy and has the holder and remaining seconds.

        Raises:
            SettingsError, LockLostError, LockTermsError, EventLoopError, StoreError: As for
                :meth:`acquire`.
        """
        answer = self._take(object(), 0, blocking=False, timeout=None)
        return answer.lease if isinstance(answer, CallerLease) else answer

    def release(self) -> None:
        """
        Undo one acquisition; after the last one, release the lock.

        This undoes the latest acquisition of this object, made in any thread or context, unless a
        ``with`` block will end that elsewhere.  If this object has acquired nothing, it undoes the
        latest acquisition by code around the call.

        If the server does not answer, the lock ends with its expiry, and no error is raised.

        Raises:
            NotOwnerError: Neither this object nor this code holds the lock; nothing was changed.
            LockLostError: The lock was lost before; another owner may hold it by now.
            StoreError: The lock is not held here, and the server did not say who holds it.
        """
        latest = self._latest()
        if latest is None:
            raise self._not_owner()
        self._undo(latest, None)

    def extend(self) -> None:
        """
        Renew the lease now; one round trip.  Usually not needed: the watchdog renews leases.

        Raises:
            NotOwnerError: Neither this object nor this code holds the lock.
            LockLostError: The lease is lost, or the lock server no longer has it.
            StoreError: The lock server did not answer.  The trust in the lease is unchanged.
        """
        held = self.held
        if held is None:
            latest = self._latest()
            if latest is None:
                raise self._not_owner()
            held = latest.held
        held.lease.ensure_held()
        if not held.lock.renew(held.lease):
            raise LockLostError(self.key, held.lease.why_ended)

    @property
    def lease(self) -> Lease | None:
        """The lease of the block around this code; None if it does not hold the lock."""
        held = self.held
        return held.lease if held is not None else None

    def locked(self) -> bool:
        """
        Return whether any owner holds one of the lock's keys; one round trip per key.

        Raises:
            StoreError: The lock server did not answer.
        """
        return bool(self.holders())

    def holders(self) -> list[Holder]:
        """
        Return the live leases: owner, token, mode, remaining seconds and the holder of each.

        They are in the order of the keys.  One round trip per key.

        Raises:
            StoreError: The lock server did not answer.
        """
        store, names = self._runtime.process.store_here, self._runtime.lock_names(self.keys)
        return [held for name in names for held in store.holders(name)]

    def __enter__(self) -> Lease:
        frame = sys._getframe(1)  # noqa: SLF001 -- CPython's, as inspect uses it
        return self.enter((id(frame), frame.f_code), frame)

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        exc: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        frame = sys._getframe(1)  # noqa: SLF001
        self.leave((id(frame), frame.f_code), exc)

    def enter(self, block: object, frame: FrameType | None = None) -> Lease:
        """
        Begin a block, which waits for the lock.

        Args:
            block: What identifies the block: address and code of the frame in which its ``with``
                statement begins and ends.  Another frame may have the same address before or after.
            frame: That frame, which ``on_lost="raise"`` interrupts; None: the asyncio task.
        """
        entry = object()
        try:
            answer = self._take(entry, block, blocking=True, timeout=self._timeout)
            if isinstance(answer, Conflict):
                raise answer.error(self._hint())  # noqa: TRY301 -- nothing to undo
            if self._stops and not (answer.execution or answer.running):
                answer.running, answer.block = Running(answer.lease, frame), entry
                answer.running.begin()
        except BaseException:
            if entry in self._own:
                self._own.pop(entry).held.leave(entry)
            raise
        return answer.lease

    def leave(self, block: object, exc: BaseException | None) -> None:
        """
        End a block that was begun by :meth:`enter`; *exc*: what has ended its body.

        A block of an ExitStack ends in another frame, and a block that the garbage collector closes
        ends in another asyncio task.  Such a block is taken to be the latest one that holds the
        lock here, or else the only one of this object.
        """
        begun = [hold for hold in list(self._own.values()) if hold.block]
        own = [hold for hold in begun if hold.block == block]
        here = self.held
        if not own and here is None:
            live = [hold for hold in begun if hold.is_live]
            own = live if len(live) == 1 else []
        ends = own[-1] if own else None
        if ends is None or not (ends.is_live or here in {None, ends.held}):
            if ends is not None:  # its lock was released in it, and taken again by another block
                self._own.pop(ends.entry, None)
            ends = self._latest(of_block=True) or ends
        if ends is not None:
            self._undo(ends, exc)
        elif exc is None:
            raise self._not_owner()
        else:
            add_note(exc, f"lock {self.key!r} is not held here any more")

    def has_begun(self, block: object) -> bool:
        """Return whether this object has begun a block that has not ended."""
        return any(hold.block == block for hold in list(self._own.values()))

    def _undo(self, hold: Hold, exc: BaseException | None) -> None:
        """
        Undo an acquisition.  A loss is raised, or added as a note to an exception in progress.

        Raises:
            LockLostError: The lease was lost, and *exc* is None.
        """
        held = hold.held
        try:
            held.leave(hold.entry)
        except BaseException:  # a signal handler's exception, at any instruction
            held.leave(hold.entry)
            raise
        self._own.pop(hold.entry, None)
        if held.lease.end is not End.LOST or isinstance(exc, LockLostError):
            return
        error = LockLostError(self.key, held.lease.why_ended)
        if exc is None:
            raise error
        add_note(exc, str(error))

    if not TYPE_CHECKING:  # a type checker is to refuse `async with`, too

        def __aenter__(self) -> Any:
            raise EventLoopError(self.key)

        def __aexit__(self, *_exc_info: object) -> Any: ...

    def __repr__(self) -> str:
        return f"<ReentrantLock {self.key!r}: {self.lease or 'not held here'}>"

    @property
    def key(self) -> str:
        """The key, or all keys in one text, for messages."""
        return " + ".join(self.keys)

    def _lock_here(self, process: Process, caller: Caller | None = None) -> Lock:
        """Return the lock on the caller's store; made again after a fork, or a close()."""
        by_thread = caller is not None and caller.kind != "task"
        store = process.store if by_thread else process.store_here
        lock = self._made
        if lock is None or lock.store is not store:
            names, kept = self._runtime.lock_names(self.keys), (store, process.watchdog)
            self._made = lock = Lock(self.keys, names, self._options, *kept, fair=self._fair)
        return lock

    def _hint(self) -> str:
        return current_caller().hint(self._lock_here(self._runtime.process))

    def _latest(self, *, of_block: bool = False) -> Hold | None:
        """Return the acquisition that a release undoes; *of_block*: if possible, of a block."""
        own = [
            hold
            for hold in list(self._own.values())
            if hold.is_live and not (hold.held.lease.finished or hold.held.lease.is_inherited)
        ]
        if len(own) == 1 and not own[0].block:  # the usual case
            return own[0]
        found = self._of_caller(own, of_block=of_block)
        blocks = [hold for hold in found if hold.block] if of_block else []
        return next(reversed(blocks or found), None)

    def _of_caller(self, own: Sequence[Hold], *, of_block: bool) -> Sequence[Hold]:
        """Return those acquisitions that the calling code may undo, the nearest kind only."""
        caller, here = current_caller(), self.held
        if found := [hold for hold in own if hold.held is here]:
            return found
        if caller.kind != "task":  # a task releases what it has acquired itself
            elsewhere = [hold for hold in own if of_block or not hold.block]
            found = [hold for hold in elsewhere if hold.held.caller == ref(caller)] or elsewhere
        if not found and here is not None:  # of other lock objects of this key
            found = [Hold(here, entry, block) for entry, block in list(here.entries.items())]
        return found

    @property
    def held(self) -> CallerLease | None:
        """The lease of the block around this code, and its acquisitions; None if there is none."""
        caller = current_caller()
        if not caller.leases:
            return None
        lock = self._lock_here(self._runtime.process, caller)
        held = caller.find(lock)
        return held if held is not None and held.is_of(lock, self._runtime) else None

    def _take(
        self, entry: object, block: object, *, blocking: bool, timeout: float | None
    ) -> CallerLease | Conflict:
        """
        Take the lock, perhaps again.

        Args:
            entry: Identifies this acquisition for its release.
            block: See :attr:`CallerLease.entries`.
            blocking: Whether to wait for it.
            timeout: Maximum seconds to wait; None: no limit.
        """
        caller, options = current_caller(), self._options
        if caller.kind != "task" and an_event_loop_runs():
            raise EventLoopError(self.key)
        for option in self._stops:
            self._refuse_to_interrupt(option, block)
        process = self._runtime.process
        lock = self._lock_here(process, caller)
        if caller.kind == "greenlet":
            process.check_patching()
        held = caller.find(lock) if caller.leases else None
        if held is not None and held.is_of(lock):
            if held.execution or held.entries:
                check_terms(held, options, caller, self._stated)
                held.lease.ensure_held()
                return self._entered(held, entry, block, caller)
            held.leave(entry)  # the last release was interrupted
        attempt, journal = attempt_of(caller, process, lock, self), process.journal
        try:
            if blocking and (caller.leases or caller.kind == "task"):
                caller.refuse_to_wait(lock)
                if timeout is None and (hint := caller.hint(lock)):
                    warn_of_wait(self.key, caller.thread.name + caller.label, hint)
            ask = partial(lock.acquire, timeout=timeout) if blocking else lock.try_acquire
            answer = ask(attempt) if journal is None else journal.around(ask, attempt, lock.names)
            if isinstance(answer, Conflict):
                lock.channel.resolved(attempt, answer, "refused")
                return answer
            held = CallerLease(lock, answer, runtime=self._runtime)
            self._entered(held, entry, block, caller)
            caller.hold(held)
        except BaseException:
            self._own.pop(entry, None)
            attempt.end()
            raise
        return held

    def _entered(
        self, held: CallerLease, entry: object, block: object, caller: Caller
    ) -> CallerLease:
        for hold in list(self._own.values()) if self._own else ():
            if not (hold.block or hold.is_live):  # released by another lock object
                self._own.pop(hold.entry, None)
        if block or caller.kind != "task":
            self._own[entry] = Hold(held, entry, block)
        held.entries[entry] = block
        return held

    def _refuse_to_interrupt(self, option: str, block: object) -> None:
        """Raise an error if this option could interrupt nothing here."""
        remedy = why_not_interruptible()
        if not block and of_task(option) in self._stated:
            remedy = "it interrupts the body of a `with` block, and nothing else: use one"
        if remedy:
            raise self._refusal(option, "raise", remedy)

    def _refusal(self, option: str, value: object, remedy: str) -> SettingsError:
        return SettingsError(f"lock {self.key!r}", option, value, remedy)

    def _not_owner(self) -> NotOwnerError:
        return NotOwnerError(
            self.key, ", ".join(holder.who for holder in self.holders()), self._hint()
        )
