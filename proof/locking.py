"""
A process that takes locks in plain Python, ``python -m proof.locking``, until its input ends.

What a worker does is written once, as coroutines: `proof.coroutines` runs them on an event loop.
Here a thread runs them, and nothing in them waits but by blocking.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from asyncio import CancelledError
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from celery_dislock import Dislock
from celery_dislock.exceptions import DislockError, LockLostError, StoreError
from celery_dislock.servers.store import Store
from proof.files import Outdated, SharedFile
from proof.history import History
from proof.holding import Holding, name
from proof.site import Site

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence

    from celery_dislock.locks.lease import Lease
    from celery_dislock.locks.reentrant import ReentrantLock

THREADS = 3  # of a process
WAITS = (0.0, 0.5, 5.0)  # seconds that an acquisition may wait

# The terms of each kind of lock, and how many locks there are of it.
KINDS: Mapping[str, tuple[int, tuple[Mapping[str, Any], ...]]] = {
    "mutex": (3, ({},)),
    "semaphore": (1, ({"limit": 3},)),
    "shared": (2, ({"mode": "shared"}, {"mode": "shared"}, {})),
    "runaway": (2, ({"max_renew_times": 3},)),
}
RUNAWAY = 8  # timeouts: a body that goes on beyond its cap
# How a file is guarded; "unguarded" shows that a lost write would be seen.
GUARDS = ("fenced", "locked", "unguarded")
PERIOD = 5.0  # seconds for which a file is written, so that none grows too long


asking: ContextVar[str] = ContextVar("asking", default="")  # the operation that is in no line yet
answered: ContextVar[bool] = ContextVar("answered", default=True)  # the last release


class Blocking:
    """A lock of threads, with the methods of one of coroutines that are used here."""

    def __init__(self, lock: ReentrantLock) -> None:
        self._lock = lock

    @property
    def lease(self) -> Lease | None:
        """The lease of this thread."""
        return self._lock.lease

    async def acquire(self, *, timeout: float) -> bool:
        """Take it."""
        if timeout:
            return self._lock.acquire(timeout=timeout)
        return self._lock.acquire(blocking=False)

    async def release(self) -> None:
        """Release it."""
        self._lock.release()

    @asynccontextmanager
    async def again(self) -> AsyncIterator[None]:
        """Take it again."""
        with self._lock:
            yield


class Worker:
    """
    One thread that takes locks until it is told to stop.

    Args:
        number: Of the thread, for its own random numbers.
        site: Where it works.
        dislock: Makes the locks.
        history: What it does is written there.
        stop: Set when it is to end.
    """

    together: Sequence[str] = ["both"] * 4

    def __init__(
        self, number: int, site: Site, dislock: Dislock, history: History, stop: threading.Event
    ) -> None:
        self._site = site
        self._dislock = dislock
        self._history = history
        self._stop = stop
        self._random = random.Random(f"{site.seed}:{number}")
        self._kinds = KINDS if site.has_lines else ("mutex",)
        self._private = f"private:{name()}"  # nobody else takes it
        self._lasts = (*[0.0, 0.01, 0.05] * 5, 2 * site.timeout)

    def _lock(self, key: str | tuple[str, ...], **terms: Any) -> Any:
        return Blocking(self._dislock.lock(key, watchdog_timeout=self._timeout(key), **terms))

    def _timeout(self, key: str | tuple[str, ...]) -> float:  # noqa: ARG002 -- others look at it
        return self._site.timeout

    async def _pause(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 -- it may block: no event loop runs here

    async def run(self) -> None:
        """Take one lock after the other."""
        while not self._stop.is_set():
            try:
                await self._take_one()
            except DislockError:
                self._private = f"private:{name()}"
            except Exception as exc:
                self._history.add("process", name(), "failed", error=repr(exc))
                raise

    async def _take_one(self) -> None:
        kind = self._random.choice([*self._kinds, *["file", "private"] * 3, *self.together])
        if kind == "file":
            await self._write_element(self._random.choice(GUARDS))
        elif kind == "private":
            await self._hold(self._private)
        elif kind == "both":
            # Others after a while: an attempt of which nobody knows what came may be in the way.
            one, other = (f"both:{nth}:{int(time.monotonic() / PERIOD)}" for nth in range(2))
            await self._hold(self._random.choice((one, other, (one, other))))
        else:
            many, terms = KINDS[kind]
            key = f"{kind}:{self._random.randrange(many)}"
            await self._hold(key, **self._random.choice(terms))

    async def _hold(self, key: str | tuple[str, ...], **terms: Any) -> None:
        """Take a lock, perhaps twice, and hold it for a while; now and then beyond its timeout."""
        lasts = self._random.choice(self._lasts)
        if terms.get("max_renew_times") and self._random.random() < 1 / 4:
            lasts = RUNAWAY * self._site.timeout
        lock = self._lock(key, **terms)
        asked = time.monotonic()
        if not (operation := await self._acquire(lock, key)):
            return
        assert lock.lease is not None
        timeout, cap = self._timeout(key), terms.pop("max_renew_times", 0)
        holding = Holding(self._history, lock.lease, asked, timeout=timeout, cap=cap, **terms)
        try:
            if self._random.random() < 1 / 4:
                async with lock.again():
                    await self._trust(holding, lasts / 2)
            await self._trust(holding, lasts)
        finally:
            holding.end()
            await self._release(lock, operation)

    async def _trust(self, holding: Holding, seconds: float) -> None:
        for pause in holding.looks(seconds):
            await self._pause(pause)

    async def _write_element(self, guard: str) -> None:
        """Read a file, and write it with one element more."""
        key, element = f"file:{guard}", name()
        path = Path(self._site.folder, f"elements-{guard}-{int(time.monotonic() / PERIOD)}")
        file = SharedFile(path, fenced=guard == "fenced")
        pause = self._random.choice((0.0, 0.005, 0.02))
        if guard == "unguarded":
            elements = file.read()
            await self._pause(pause)
            file.write([*elements, element])
            self._history.add("element", element, "ok", file=path.name, guard=guard)
            return
        lock = self._lock(key)
        asked = time.monotonic()
        if not (operation := await self._acquire(lock, key)):
            return
        assert lock.lease is not None
        lease = lock.lease
        holding = Holding(self._history, lease, asked, timeout=self._timeout(key))
        try:
            with suppress(Outdated, LockLostError):
                elements = file.read(lease.token)
                await self._trust(holding, pause)
                if guard == "locked":
                    lease.ensure_held()
                file.write([*elements, element], lease.token)
                self._history.add("element", element, "ok", file=path.name, guard=guard)
        finally:
            holding.end()
            await self._release(lock, operation)

    async def _acquire(self, lock: Any, key: str | tuple[str, ...]) -> str:
        operation, timeout = name(), self._random.choice(WAITS)
        more: Any = {"key": key, "lasts": self._timeout(key)}
        if isinstance(key, tuple):  # all or none: it does not wait with some of them
            timeout, more = 0.0, {**more, "key": " + ".join(key), "keys": key}
        fair = self._site.has_lines and not more["key"].startswith(("semaphore", "shared", "both"))
        more |= {"timeout": timeout, "fair": fair}
        self._history.add("operation", operation, "invoke", **more)
        asking.set(operation)
        try:
            taken: bool = await lock.acquire(timeout=timeout)
        except DislockError as exc:
            self._history.add("operation", operation, "unknown", error=str(exc))
            await self._pause(0.05)
            raise
        except CancelledError:
            self._history.add("operation", operation, "cancelled")
            raise
        self._history.add("operation", operation, "ok" if taken else "refused")
        return operation if taken else ""

    async def _release(self, lock: Any, operation: str) -> None:
        answered.set(True)
        try:
            await lock.release()
        except CancelledError:
            self._history.add("operation", operation, "cancelled")
            raise
        self._history.add("operation", operation, "freed", answered=answered.get())


def note_places(history: History) -> None:
    """Note it when an operation waits in line, and when a release is not answered."""
    wait, release = Store.wait, Store.release

    def noted(*args: Any, **kwargs: Any) -> Any:
        if operation := asking.get():
            history.add("operation", operation, "in line")
            asking.set("")
        return wait(*args, **kwargs)

    def asked(*args: Any, **kwargs: Any) -> Any:
        try:
            return release(*args, **kwargs)
        except StoreError:
            answered.set(False)
            raise

    setattr(Store, "wait", noted)
    setattr(Store, "release", asked)


def run_here(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run in this thread what never waits but by blocking."""
    with suppress(StopIteration):
        work().send(None)
        raise AssertionError("it waits for an event loop")


def main() -> None:
    """Work until the standard input ends."""
    site, stop = Site.of_this_process(), threading.Event()
    history = History(Path(site.folder, "history"))
    history.show_life()
    note_places(history)
    with Dislock.from_url(site.url, transport_options=site.options) as dislock:
        workers = [Worker(n, site, dislock, history, stop) for n in range(THREADS)]
        threads = [threading.Thread(target=run_here, args=(worker.run,)) for worker in workers]
        for thread in threads:
            thread.start()
        sys.stdin.read()
        stop.set()
        for thread in threads:
            thread.join()
    history.close()


if __name__ == "__main__":
    main()
