"""End the block that has taken a lock, wherever the block ends.

The interpreter looks ``__exit__`` up before it enters a block.  So each block gets an exit of its
own here, and each entry into an ``ExitStack``, which looks it up on the class.  The exit knows what
was entered: it undoes just that, also in another thread or asyncio task, as when the garbage
collector closes a generator.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

from celery_dislock.exceptions import LockLostError
from celery_dislock.locks.callers import current_caller

if TYPE_CHECKING:
    from types import TracebackType

    from celery_dislock.locks.callers import CallerLease


class Lock(Protocol):
    """A lock of plain Python, as its blocks know it."""

    @property
    def held(self) -> CallerLease | None:
        """The caller's lease; None if it has none."""

    def leave(self, exc: BaseException | None) -> None:
        """End the last block that has entered here."""


class Leaving:
    """
    The ``__exit__`` of one ``with`` statement, or of one lock of an ``ExitStack``.

    The interpreter looks it up when the statement begins, and drops it when the statement ends.  If
    a signal handler raises an exception just before the call, ``__exit__`` is never called.  The
    lock is then released when the interpreter drops this object.

    Attributes:
        lock: The lock; None: that which is entered next, of a stack.
        held: The lease of the block; None until it has been entered.
    """

    __slots__ = ("__weakref__", "_entry", "held", "lock")

    def __init__(self, lock: Lock | None) -> None:
        self.lock: Any = lock
        self.held: CallerLease | None = None
        self._entry: object = None

    def entered(self, lock: Lock, held: CallerLease, entry: object) -> None:
        """Record the acquisition that the statement must undo, if *lock* is its lock."""
        if self.lock is not None and self.lock is not lock:
            return
        self._entry = entry
        self.held = held
        # Not __del__: it would always run, and would swallow a signal handler's exception.
        held.entries[entry] = weakref.ref(self, lambda _dropped: held.leave(entry))

    def from_stack(self, lock: Lock, *exc_info: Any) -> None:
        """End the block of a stack, which tells its lock when the block ends."""
        self.lock = lock
        self(*exc_info)

    def __call__(
        self,
        _kind: type[BaseException] | None,
        exc: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        """Undo the block's acquisition; raises see :class:`celery_dislock.ReentrantLock`."""
        held, lock = self.held, self.lock
        if held is None:  # __enter__ was called directly
            lock.leave(exc)
            return
        if self._entry not in held.entries:  # released in the block, and perhaps taken again
            now = lock.held
            if now is not None and now is not held and now.entries:
                lock.leave(exc)
                return
        leave(held, self._entry, exc)


class Exit:
    """The ``__exit__`` of a class of locks: makes a :class:`Leaving` for each block."""

    def __get__(self, lock: Lock | None, kind: type[Lock]) -> Any:
        leaving = Leaving(lock)
        current_caller().entering = weakref.ref(leaving)  # for the __enter__ that comes next
        return leaving.from_stack if lock is None else leaving


def leave(held: CallerLease, entry: object, exc: BaseException | None) -> None:
    """
    Undo an acquisition.  A loss is raised, or added as a note to an exception in progress.

    Raises:
        LockLostError: The lease was lost, and *exc* is None.
    """
    try:
        held.leave(entry)
    except BaseException:  # a signal handler's exception, at any instruction
        held.leave(entry)
        raise
    if not held.lease.lost or isinstance(exc, LockLostError):
        return
    error = LockLostError(held.lease.key, held.lease.why_ended)
    if exc is None:
        raise error
    note(exc, str(error))


def note(exc: BaseException, text: str) -> None:
    """Add a note, like ``BaseException.add_note`` of Python 3.11."""
    notes: list[str] = getattr(exc, "__notes__", [])
    exc.__notes__ = [*notes, text]  # type: ignore[attr-defined]
