"""A process that takes locks in plain Python, ``python -m proof.locking``, until its input ends."""

from __future__ import annotations

import random
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from celery_dislock import Dislock
from celery_dislock.exceptions import DislockError, LockLostError
from celery_dislock.servers.store import Store
from proof.files import Outdated, SharedFile
from proof.history import History
from proof.holding import Holding, name
from proof.site import Site

if TYPE_CHECKING:
    from collections.abc import Mapping

THREADS = 3  # of a process
WAITS = (0.0, 0.5, 5.0)  # seconds that an acquisition may wait

# The terms of each kind of lock, and how many locks there are of it.
KINDS: Mapping[str, tuple[int, tuple[Mapping[str, Any], ...]]] = {
    "mutex": (3, ({},)),
    "semaphore": (1, ({"limit": 3},)),
    "shared": (2, ({"mode": "shared"}, {"mode": "shared"}, {})),
}
# How a file is guarded; "unguarded" shows that a lost write would be seen.
GUARDS = ("fenced", "locked", "unguarded")
PERIOD = 5.0  # seconds for which a file is written, so that none grows too long


class Worker:
    """
    One thread that takes locks until it is told to stop.

    Args:
        number: Of the thread, for its own random numbers.
        site: Where it works.
        dislock: Makes the locks.
        history: What it does is written there.
        stop: Set when it is to end.
        asking: Has the operation of each thread.
    """

    def __init__(
        self,
        number: int,
        site: Site,
        dislock: Dislock,
        history: History,
        stop: threading.Event,
        asking: threading.local,
    ) -> None:
        self._site = site
        self._dislock = dislock
        self._history = history
        self._stop = stop
        self._asking = asking
        self._random = random.Random(f"{site.seed}:{number}")
        self._kinds = KINDS if site.has_lines else ("mutex",)
        self._private = f"private:{name()}"  # nobody else takes it

    def run(self) -> None:
        """Take one lock after the other."""
        while not self._stop.is_set():
            kind = self._random.choice([*self._kinds, *["file", "private"] * 3])
            try:
                if kind == "file":
                    self._write_element(self._random.choice(GUARDS))
                elif kind == "private":
                    self._hold(self._private)
                else:
                    many, terms = KINDS[kind]
                    key = f"{kind}:{self._random.randrange(many)}"
                    self._hold(key, **self._random.choice(terms))
            except DislockError:
                self._private = f"private:{name()}"

    def _hold(self, key: str, **terms: Any) -> None:
        """Take a lock, perhaps twice, and hold it for a while; now and then beyond its timeout."""
        lasts = self._random.choice((*[0.0, 0.01, 0.05] * 5, 2 * self._site.timeout))
        lock = self._dislock.lock(key, watchdog_timeout=self._site.timeout, **terms)
        asked = time.monotonic()
        if not (operation := self._acquire(lock, key)):
            return
        assert lock.lease is not None
        holding = Holding(self._history, lock.lease, asked, timeout=self._site.timeout, **terms)
        if self._random.random() < 1 / 4:
            with lock:
                holding.trust(lasts / 2)
        holding.trust(lasts)
        holding.end()
        self._release(lock, operation)

    def _write_element(self, guard: str) -> None:
        """Read a file, and write it with one element more."""
        key, element = f"file:{guard}", name()
        path = Path(self._site.folder, f"elements-{guard}-{int(time.monotonic() / PERIOD)}")
        file = SharedFile(path, fenced=guard == "fenced")
        pause = self._random.choice((0.0, 0.005, 0.02))
        if guard == "unguarded":
            elements = file.read()
            time.sleep(pause)
            file.write([*elements, element])
            self._history.add("element", element, "ok", file=path.name, guard=guard)
            return
        lock = self._dislock.lock(key, watchdog_timeout=self._site.timeout)
        asked = time.monotonic()
        if not (operation := self._acquire(lock, key)):
            return
        assert lock.lease is not None
        lease = lock.lease
        holding = Holding(self._history, lease, asked, timeout=self._site.timeout)
        with suppress(Outdated, LockLostError):
            elements = file.read(lease.token)
            holding.trust(pause)
            if guard == "locked":
                lease.ensure_held()
            file.write([*elements, element], lease.token)
            self._history.add("element", element, "ok", file=path.name, guard=guard)
        holding.end()
        self._release(lock, operation)

    def _acquire(self, lock: Any, key: str) -> str:
        operation, timeout = name(), self._random.choice(WAITS)
        fair = self._site.has_lines and not key.startswith(("semaphore", "shared"))
        self._history.add("operation", operation, "invoke", key=key, timeout=timeout, fair=fair)
        self._asking.operation = operation
        try:
            taken: bool = lock.acquire(timeout=timeout)
        except DislockError as exc:
            self._history.add("operation", operation, "unknown", error=str(exc))
            time.sleep(0.05)
            raise
        self._history.add("operation", operation, "ok" if taken else "refused")
        return operation if taken else ""

    def _release(self, lock: Any, operation: str) -> None:
        lock.release()
        self._history.add("operation", operation, "freed")


def note_places(history: History) -> threading.local:
    """Note it when an operation waits in line; returns what each thread keeps its operation in."""
    asking, wait = threading.local(), Store.wait

    def noted(*args: Any, **kwargs: Any) -> Any:
        if operation := asking.operation:
            history.add("operation", operation, "in line")
            asking.operation = ""
        return wait(*args, **kwargs)

    setattr(Store, "wait", noted)
    return asking


def main() -> None:
    """Work until the standard input ends."""
    site, stop = Site.of_this_process(), threading.Event()
    history = History(Path(site.folder, "history"))
    asking = note_places(history)
    with Dislock.from_url(site.url, transport_options=site.options) as dislock:
        workers = [Worker(n, site, dislock, history, stop, asking) for n in range(THREADS)]
        threads = [threading.Thread(target=worker.run) for worker in workers]
        for thread in threads:
            thread.start()
        sys.stdin.read()
        stop.set()
        for thread in threads:
            thread.join()
    history.close()


if __name__ == "__main__":
    main()
