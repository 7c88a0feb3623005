"""Locks for coroutines, whose owner is the asyncio task.

They are the locks of :mod:`celery_dislock.locks.reentrant`, run by
:mod:`celery_dislock.servers.bridge`: a coroutine waits wherever a thread would.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from celery_dislock.exceptions import LockLostError
from celery_dislock.locks.callers import caller_of, current_caller
from celery_dislock.locks.interruption import why_stopped
from celery_dislock.servers.bridge import require_greenlet, run_at_once, task_here

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from datetime import timedelta
    from types import TracebackType

    from celery_dislock.locks.lease import Lease
    from celery_dislock.locks.reentrant import ReentrantLock
    from celery_dislock.locks.runtime import Runtime
    from celery_dislock.servers.records import Conflict
    from celery_dislock.servers.view import Holder

P = ParamSpec("P")
T = TypeVar("T")


class AsyncLock:
    """
    A lock that an asyncio task owns.  Made by :meth:`celery_dislock.Dislock.async_lock`.

    Use it in an ``async with`` block, which waits for the lock and returns the lease::

        async with dislock.async_lock("export:7") as lease:
            ...
            lease.ensure_held()

    As with a blocking lock, its owner can take it again, on the same terms, and must release it
    once per acquisition; all lock objects of a key share one count.  Tasks that the owner starts,
    as with :func:`asyncio.gather`, are other owners, and wait for the lock.

    If the lock is lost while the body runs, the body is cancelled, and the block ends with
    :class:`~celery_dislock.exceptions.LockLostError`; with ``on_lost="warn"`` the body runs on.

    A method that is cancelled leaves no lease, no place in line and no connection behind: the
    watchdog's thread tells the lock server within moments.  A release that is cancelled is done.

    Attributes:
        keys: The keys of the lock.  All of several keys are taken, or none.
    """

    def __init__(self, lock: ReentrantLock, runtime: Runtime[Any]) -> None:
        require_greenlet()
        self._lock = lock
        self._runtime = runtime
        self.keys = lock.keys

    async def acquire(
        self,
        blocking: bool = True,  # noqa: FBT001, FBT002 -- as in threading
        timeout: float | timedelta | None = None,
    ) -> bool:
        """Take the lock; see :meth:`celery_dislock.ReentrantLock.acquire`."""
        return await self._run(self._lock.acquire, blocking, timeout)

    async def try_acquire(self) -> Lease | Conflict:
        """
        Take the lock if it is free; one round trip.

        See :meth:`celery_dislock.ReentrantLock.try_acquire`.
        """
        return await self._run(self._lock.try_acquire)

    async def release(self) -> None:
        """
        Undo one acquisition of this task; after the last one, release the lock.

        See :meth:`celery_dislock.ReentrantLock.release`.
        """
        await self._run(self._lock.release)

    async def extend(self) -> None:
        """Renew the lease now; see :meth:`celery_dislock.ReentrantLock.extend`."""
        await self._run(self._lock.extend)

    async def locked(self) -> bool:
        """
        Return whether any owner holds one of the lock's keys; one round trip per key.

        Raises:
            StoreError: The lock server did not answer.
        """
        return await self._run(self._lock.locked)

    async def holders(self) -> list[Holder]:
        """
        Return the live leases.

        See :meth:`celery_dislock.ReentrantLock.holders`.
        """
        return await self._run(self._lock.holders)

    @property
    def lease(self) -> Lease | None:
        """The lease of this task; None if it does not hold the lock."""
        return run_at_once(lambda: self._lock.lease)

    if not TYPE_CHECKING:  # a type checker is to refuse `with`, too

        def __enter__(self) -> Any:
            key = self._lock.key
            raise TypeError(f"lock {key!r} is for coroutines: use `async with`, or dislock.lock()")

        def __exit__(self, *_exc_info: object) -> Any: ...

    def __repr__(self) -> str:
        return f"<AsyncLock {self._lock.key!r}>"

    async def __aenter__(self) -> Lease:
        return await self._run(self._enter)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(exc, GeneratorExit) and not self._has_begun_here():
            self._leave(exc)  # the garbage collector closes the block, and nothing can be awaited
        else:
            await self._run(self._leave, exc)

    def _has_begun_here(self) -> bool:
        try:
            return self._lock.has_begun(id(caller_of(task_here())))
        except RuntimeError:  # no task runs here
            return False

    def _enter(self) -> Lease:
        return self._lock.enter(id(current_caller()))

    def _leave(self, exc: BaseException | None) -> None:
        held = self._lock.held
        running = None if held is None else held.running
        ours = exc is not None and running is not None and running.took_back(exc)
        try:
            self._lock.leave(id(current_caller()), None if ours else exc)
        except LockLostError as lost:
            raise lost from exc
        if ours and held is not None:
            raise why_stopped(held.lease) from exc

    def _run(
        self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, T]:
        return self._runtime.on_loop(function, *args, **kwargs)
