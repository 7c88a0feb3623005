"""
A process in which coroutines take locks, ``python -m proof.coroutines``, until its input ends.

They do what the threads of :mod:`proof.locking` do, on the same keys.  Each is cancelled again and
again, at any of its awaits, and goes on.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from celery_dislock import Dislock
from proof.history import History
from proof.holding import name
from proof.locking import Worker, note_places
from proof.site import Site

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable

    from celery_dislock.locks.asynchronous import AsyncLock
    from celery_dislock.locks.lease import Lease

T = TypeVar("T")

COROUTINES = 4  # of a process
RARELY, OFTEN = 0.5, -3.5  # seconds between two cancellations of a coroutine, as powers of ten
LONG = 10.0  # seconds of a lease that nobody else wants: what a cancellation leaves is seen
NEW_PRIVATE = 1 / 4  # of the cancellations: what was cancelled during a fault may be in the way


class Cancelled:
    """
    A lock whose every method may be cancelled.

    Args:
        lock: The lock.
        by: The worker that uses it.
    """

    def __init__(self, lock: AsyncLock, by: Coroutine) -> None:
        self._lock = lock
        self._by = by

    @property
    def lease(self) -> Lease | None:
        """The lease of this task."""
        return self._lock.lease

    async def acquire(self, *, timeout: float) -> bool:
        """Take it."""
        return await self._by.met("acquire", self._lock.acquire(timeout=timeout))

    async def release(self) -> None:
        """Release it."""
        await self._by.met("release", self._lock.release())

    @asynccontextmanager
    async def again(self) -> AsyncIterator[None]:
        """Take it again, for a block whose body is cancelled when it is lost."""
        await self._by.met("__aenter__", self._lock.__aenter__())
        try:
            yield
        except BaseException as exc:
            await self._by.met("__aexit__", self._lock.__aexit__(type(exc), exc, exc.__traceback__))
            raise
        else:
            await self._by.met("__aexit__", self._lock.__aexit__(None, None, None))


class Coroutine(Worker):
    """One asyncio task that takes locks, and is cancelled at random."""

    together = ()  # what was cancelled may be in the way, so that no refusal can be judged
    _asked = 0.0  # when a cancellation was asked for that was not met yet
    _met = 0  # cancellations since the last that ended what the task does

    def _lock(self, key: str | tuple[str, ...], **terms: Any) -> Any:
        lock = self._dislock.async_lock(key, watchdog_timeout=self._timeout(key), **terms)
        return Cancelled(lock, self)

    def _timeout(self, key: str | tuple[str, ...]) -> float:
        return LONG if key == self._private else self._site.timeout

    async def _pause(self, seconds: float) -> None:
        await self.met("the body", asyncio.sleep(seconds))

    async def met(self, where: str, awaited: Awaitable[T]) -> T:
        """Await something; a cancellation that was asked for meanwhile must be raised by it."""
        try:
            result = await awaited
        except asyncio.CancelledError:
            if self._asked:
                self._history.add("cancellation", name(), "met", where=where, asked=self._asked)
                self._asked = 0.0
                self._met += 1
            raise
        finally:
            if self._asked:
                self._history.add("cancellation", name(), "hidden", where=where)
                self._asked = 0.0
        return result

    async def run(self) -> None:
        """Take one lock after the other."""
        task = asyncio.current_task()
        assert task is not None
        cancelling = asyncio.create_task(self._cancel(task))
        while not self._stop.is_set():
            try:
                await super().run()
            except asyncio.CancelledError:
                if not self._met:
                    self._history.add("cancellation", name(), "not asked for", where="the body")
                if self._random.random() < NEW_PRIVATE:
                    self._private = f"private:{name()}"
            if sys.version_info >= (3, 11):
                for _ in range(self._met):
                    task.uncancel()
                if task.cancelling() and not self._asked:
                    self._history.add("cancellation", name(), "not taken back", where="the body")
                    while task.uncancel():
                        pass
            self._met = 0
        cancelling.cancel()

    async def _cancel(self, task: asyncio.Task[Any]) -> None:
        while True:
            await asyncio.sleep(10 ** self._random.uniform(OFTEN, RARELY))
            if not self._asked:
                self._asked = time.monotonic()
                task.cancel()


async def work() -> None:
    """Work until the standard input ends."""
    site, stop = Site.of_this_process(), threading.Event()
    history = History(Path(site.folder, "history"))
    history.show_life()
    note_places(history)
    async with Dislock.from_url(site.url, transport_options=site.options) as dislock:
        workers = [Coroutine(n, site, dislock, history, stop) for n in range(COROUTINES)]
        tasks = [asyncio.create_task(worker.run()) for worker in workers]
        await asyncio.to_thread(sys.stdin.read)
        stop.set()
        await asyncio.gather(*tasks)
    history.close()


if __name__ == "__main__":
    asyncio.run(work())
