"""A process that takes locks in plain Python: ``python -m proof.locking``.

Its standard input has one line, the :class:`Site` as JSON; it works until the input ends.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from celery_dislock import Dislock
from celery_dislock.exceptions import DislockError, LockLostError
from proof.controls import CONTROLS
from proof.files import Outdated, SharedFile
from proof.history import History

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from celery_dislock.locks.lease import Lease
    from celery_dislock.locks.reentrant import ReentrantLock

THREADS = 3  # of a process
STEP = 0.003  # seconds between two looks at a lease
WAIT = 5.0  # seconds, the longest that an acquisition may wait


@dataclass(frozen=True)
class Site:
    """
    What the processes of one run share.

    Attributes:
        url: The lock server.
        folder: The history and the files.
        seed: Of this process.
        timeout: Seconds of a lease.
        control: What is broken on purpose; empty: nothing is.
    """

    url: str
    folder: str
    seed: int
    timeout: float
    control: str = ""

    def to_json(self) -> str:
        """Return it as one line."""
        return json.dumps(asdict(self))


# The terms of each kind of lock, and how many locks there are of it.
KINDS: Mapping[str, tuple[int, tuple[Mapping[str, Any], ...]]] = {
    "mutex": (3, ({},)),
    "semaphore": (1, ({"limit": 3},)),
    "shared": (2, ({"mode": "shared"}, {"mode": "shared"}, {})),
}
# How a file is guarded, and by which file; "unguarded" shows that the history can see a lost write.
GUARDS = ("fenced", "locked", "unguarded")
PERIOD = 5.0  # seconds for which a file is written


class Worker:
    """
    One thread that takes locks until it is told to stop.

    Args:
        number: Of the thread, for its own random numbers.
        site: Where it works.
        dislock: Makes the locks.
        history: What it does is written there.
        names: Makes the names of what it does.
        stop: Set when it is to end.
    """

    def __init__(
        self,
        number: int,
        site: Site,
        dislock: Dislock,
        history: History,
        names: Iterator[int],
        stop: threading.Event,
    ) -> None:
        self._site = site
        self._dislock = dislock
        self._history = history
        self._names = names
        self._stop = stop
        self._random = random.Random(f"{site.seed}:{number}")

    def run(self) -> None:
        """Take one lock after the other."""
        while not self._stop.is_set():
            kind = self._random.choice([*KINDS, "file", "file", "file"])
            if kind == "file":
                self._write_element(self._random.choice(GUARDS))
            else:
                many, terms = KINDS[kind]
                key = f"{kind}:{self._random.randrange(many)}"
                self._hold(key, dict(self._random.choice(terms)))

    def _hold(self, key: str, terms: dict[str, Any]) -> None:
        """Take a lock and hold it for a while; twice the timeout now and then."""
        lasts = self._random.choice((*[0.0, 0.01, 0.05] * 5, 2 * self._site.timeout))
        again = self._random.random() < 1 / 4 and not terms
        lock = self._dislock.lock(key, timeout=None, watchdog_timeout=self._site.timeout, **terms)
        lease = self._acquire(lock, key)
        if lease is None:
            return
        name = self._begin(key, lease, terms)
        if again:
            lock.acquire()
        self._trust(name, lease, lasts)
        if again:
            lock.release()
        self._end(name, lock)

    def _write_element(self, guard: str) -> None:
        """Read the file, and write it with one element more."""
        key = f"file:{guard}"
        # Another file each few seconds, so that none grows too long to be read quickly.
        name = f"elements-{guard}-{int(time.monotonic() / PERIOD)}"
        file = SharedFile(Path(self._site.folder, name), fenced=guard == "fenced")
        element = self._name()
        pause = self._random.choice((0.0, 0.005, 0.02))
        if guard == "unguarded":
            elements = file.read()
            time.sleep(pause)
            file.write([*elements, element])
            self._history.add("element", element, "ok", file=name, guard=guard)
            return
        lock = self._dislock.lock(key, watchdog_timeout=self._site.timeout)
        lease = self._acquire(lock, key)
        if lease is None:
            return
        hold, token = self._begin(key, lease, {}), lease.token
        try:
            elements = file.read(token)
            self._trust(hold, lease, pause)
            if guard == "locked":
                lease.ensure_held()
            file.write([*elements, element], token)
        except (Outdated, LockLostError):
            pass
        else:
            self._history.add("element", element, "ok", file=name, guard=guard)
        self._end(hold, lock)

    def _acquire(self, lock: ReentrantLock, key: str) -> Lease | None:
        """Take the lock; returns its lease, or None."""
        name, timeout = self._name(), self._random.choice((0.0, 0.5, WAIT))
        self._history.add("operation", name, "invoke", key=key, timeout=timeout)
        try:
            taken = lock.acquire(timeout=timeout)
        except DislockError as exc:
            self._history.add("operation", name, "unknown", error=str(exc))
            time.sleep(0.05)
            return None
        self._history.add("operation", name, "ok" if taken else "refused")
        return lock.lease if taken else None

    def _begin(self, key: str, lease: Lease, terms: dict[str, Any]) -> str:
        name, at = self._name(), time.monotonic()
        # It may have been stopped since the grant: then the lease is not trusted at all.
        if lease.held:
            self._history.add(
                "hold",
                name,
                "begin",
                at=at,
                key=key,
                token=lease.token,
                timeout=self._site.timeout,
                **terms,
            )
            return name
        return ""

    def _trust(self, name: str, lease: Lease, lasts: float) -> None:
        """Look at the lease until the time is over, and a little beyond its loss."""
        until = time.monotonic() + lasts
        while name:
            at = time.monotonic()
            if not lease.held:
                self._history.add("hold", name, "lost", why=lease.why_ended)
                time.sleep(STEP)
                return
            self._history.add("hold", name, "trust", at=at)
            if at >= until or self._stop.is_set():
                return
            time.sleep(STEP)

    def _end(self, name: str, lock: ReentrantLock) -> None:
        at = time.monotonic()
        held = lock.lease is not None and lock.lease.held
        if name:
            if not held:
                self._history.add("hold", name, "lost")
            self._history.add("hold", name, "end", at=at if held else None)
        with suppress(DislockError):
            lock.release()

    def _name(self) -> str:
        return f"{os.getpid()}:{next(self._names)}"


def main() -> None:
    """Work until the standard input ends."""
    site = Site(**json.loads(sys.stdin.readline()))
    if site.control:
        breaks, _ = CONTROLS[site.control]
        breaks()
    history, stop, names = History(Path(site.folder, "history")), threading.Event(), count()
    with Dislock.from_url(site.url) as dislock:
        workers = [Worker(n, site, dislock, history, names, stop) for n in range(THREADS)]
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
