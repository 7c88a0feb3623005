"""
Take locks, or send and run tasks, with one library, until the standard input ends.

    python -m proof.peering take | work | send | probe LIBRARY

Each library is used as its documentation says, with its defaults and those of redis-py.  What it
leaves to the body is done: redis-py's lock is renewed every third of its timeout, as ours is, and
RedBeat's five times, as its ``tick()`` does.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import redis
from celery import Celery

from celery_dislock import Dislock, SingletonTask
from celery_dislock.exceptions import LockHeldError, LockLostError
from proof.files import Outdated, SharedFile
from proof.history import History
from proof.holding import name
from proof.site import Site

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from celery import Task

THREADS = 4  # of a process that takes locks
KEYS = 2  # of each use
TASK_KEYS = 4  # at a time
WAITS = (0, 1, 5)  # seconds: python-redis-lock waits for whole ones
STEP = 0.01  # seconds between two steps of a body
PERIOD = 5.0  # seconds after which another file is written, and tasks have other keys
PAUSE = 0.06  # seconds between two tasks, on average
AGAIN = {"max_retries": 3, "interval_start": 0.1, "interval_max": 0.5}

# How a body uses a lock: it trusts it until an exception says that it is lost, or it asks the
# library before each step.
USES = ("plain", "asked")


class Refused(Exception):  # noqa: N818 -- reads as what is the case
    """Somebody else has the lock."""


class Lost(Exception):  # noqa: N818 -- as Refused
    """The library says that the lock is lost."""


@dataclass
class Grip:
    """
    A lock that was taken.

    Attributes:
        asks: Asks the library whether it is still held.
        token: Its fencing token; None: the library has none.
        keep: Renews it, if the library leaves that to the body.
        every: Seconds between two renewals.
    """

    asks: Callable[[], bool]
    token: int | None = None
    keep: Callable[[], object] = lambda: None
    every: float = 0.0


def ours(site: Site) -> Callable[[str, int], AbstractContextManager[Grip]]:
    """Return what takes our lock: a loss raises an exception in the body."""
    dislock = Dislock.from_url(site.url, transport_options=site.options)

    @contextmanager
    def take(key: str, wait: int) -> Iterator[Grip]:
        lock = dislock.lock(key, timeout=wait, watchdog_timeout=site.timeout, on_lost="raise")
        try:
            with lock as lease:
                yield Grip(lambda: lease.held, lease.token)
        except LockHeldError as exc:
            raise Refused from exc
        except LockLostError as exc:
            raise Lost from exc

    return take


def redis_py(site: Site) -> Callable[[str, int], AbstractContextManager[Grip]]:
    """Return what takes redis-py's lock, which the body renews with ``reacquire()``."""
    client = client_of(site)

    @contextmanager
    def take(key: str, wait: int) -> Iterator[Grip]:
        lock = client.lock(key, timeout=site.timeout)
        if not lock.acquire(blocking=wait > 0, blocking_timeout=wait):
            raise Refused
        with released(lock, redis.exceptions.LockNotOwnedError):
            yield Grip(lock.owned, keep=lock.reacquire, every=site.timeout / 3)

    return take


def python_redis_lock(site: Site) -> Callable[[str, int], AbstractContextManager[Grip]]:
    """Return what takes python-redis-lock's, which a thread renews."""
    import redis_lock  # noqa: PLC0415

    client = client_of(site)

    @contextmanager
    def take(key: str, wait: int) -> Iterator[Grip]:
        lock = redis_lock.Lock(client, key, expire=int(site.timeout), auto_renewal=True)
        if not lock.acquire(blocking=wait > 0, timeout=wait or None):
            raise Refused
        with released(lock, redis_lock.NotAcquired):
            yield Grip(lambda: lock.get_owner_id() == lock.id)

    return take


def redbeat(site: Site) -> Callable[[str, int], AbstractContextManager[Grip]]:
    """Return what takes a lock as RedBeat's scheduler does, and extends it at each tick."""
    from redbeat.schedulers import (  # noqa: PLC0415
        LUA_EXTEND_TO_SCRIPT,
        get_redis,
    )

    app = Celery("redbeat", set_as_current=False)
    app.conf.redbeat_redis_url = site.url
    client, tick = get_redis(app), site.timeout / 5

    @contextmanager
    def take(key: str, wait: int) -> Iterator[Grip]:
        lock = client.lock(key, timeout=site.timeout, sleep=tick)
        lock.lua_extend = client.register_script(LUA_EXTEND_TO_SCRIPT)
        if not lock.acquire(blocking=wait > 0, blocking_timeout=wait):
            raise Refused
        with released(lock, redis.exceptions.LockNotOwnedError):
            yield Grip(lock.owned, keep=lambda: lock.extend(int(site.timeout)), every=tick)

    return take


def client_of(site: Site) -> redis.Redis:
    """Return a client of the lock server, made as redis-py's documentation does."""
    server = urlsplit(str(site.url))
    return redis.Redis(host=str(server.hostname), port=server.port or 6379)


@contextmanager
def released(lock: Any, lost: type[Exception]) -> Iterator[None]:
    """Release a lock at the end; the exception *lost* says that it was lost."""
    try:
        try:
            yield
        finally:
            lock.release()
    except lost as exc:
        raise Lost from exc


LOCKS = {
    "celery-dislock": ours,
    "redis-py": redis_py,
    "python-redis-lock": python_redis_lock,
    "celery-redbeat": redbeat,
}


class Taker:
    """
    One thread that takes locks until it is told to stop.

    Args:
        number: Of the thread, for its own random numbers.
        site: Where it works.
        take: Takes the library's lock of a key; raises Refused, and Lost.
        history: What it does is written there.
    """

    def __init__(
        self,
        number: int,
        site: Site,
        take: Callable[[str, int], AbstractContextManager[Grip]],
        history: History,
    ) -> None:
        self._site = site
        self._take = take
        self._history = history
        self._random = random.Random(f"{site.seed}:{number}")
        self._private = f"private:{name()}"  # nobody else takes it
        self._asks = False

    def run(self, stop: threading.Event) -> None:
        """Take one lock after the other."""
        while not stop.is_set():
            use = self._random.choice(USES)
            self._asks = use == "asked"
            what = self._random.choice(("mutex", "file", "fenced", "private"))
            key = self._private if what == "private" else f"{use}:{what}"
            if what == "mutex":
                key += f":{self._random.randrange(KEYS)}"
            write = {"file": use, "fenced": "fenced"}.get(what, "")
            operation, wait = name(), self._random.choice(WAITS)
            asked, taken = time.monotonic(), False
            self._history.add("operation", operation, "invoke", key=key, timeout=wait)
            try:
                with self._take(key, wait) as grip:
                    taken = True
                    self._history.add("operation", operation, "ok")
                    if write != "fenced" or grip.token is not None:
                        self._hold(grip, key, asked, write)
            except Refused:
                self._history.add("operation", operation, "refused")
            except Exception as exc:  # noqa: BLE001 -- whatever the library raises
                if not taken:
                    self._history.add("operation", operation, "unknown", error=repr(exc))
                self._private = f"private:{name()}"
                stop.wait(0.05)
            else:
                self._history.add("operation", operation, "freed")

    def _hold(self, grip: Grip, key: str, asked: float, write: str) -> None:
        """Do the work of a body, which believes that it has the lock."""
        about, site = name(), self._site
        terms: dict[str, Any] = {"key": key, "asked": asked, "timeout": site.timeout}
        self._history.add("hold", about, "begin", token=grip.token, **terms)
        try:
            if write:
                self._write(grip, about, write)
            else:
                self._believe(grip, about)
            at = time.monotonic()
        except BaseException as exc:
            self._history.add("hold", about, "lost", why=repr(exc))
            raise
        self._history.add("hold", about, "end", at=at)

    def _believe(self, grip: Grip, about: str) -> None:
        """Go on step by step; now and then beyond the timeout."""
        lasts, now = (
            self._random.choice((*[0.01, 0.05] * 6, 2 * self._site.timeout)),
            time.monotonic(),
        )
        until, due = now + lasts, now + grip.every
        while True:
            at = time.monotonic()
            if self._asks and not grip.asks():
                raise Lost
            self._history.add("hold", about, "trust", at=at)
            if at >= until:
                return
            if at >= due:
                grip.keep()
                due = at + grip.every
            time.sleep(STEP)

    def _write(self, grip: Grip, about: str, guard: str) -> None:
        """Read the file, and write it with one element more."""
        path = Path(self._site.folder, f"elements-{guard}-{int(time.monotonic() / PERIOD)}")
        file, token = SharedFile(path, fenced=guard == "fenced"), grip.token or 0
        try:
            elements = file.read(token)
            self._believe(grip, about)
            file.write([*elements, about], token)
        except Outdated as exc:
            raise Lost from exc
        self._history.add("element", about, "ok", file=path.name, guard=guard)


def take_locks(library: str, site: Site, stop: threading.Event) -> None:
    """Take locks in several threads."""
    history, take = History(Path(site.folder, "history")), LOCKS[library](site)
    takers = [Taker(number, site, take, history) for number in range(THREADS)]
    threads = [threading.Thread(target=taker.run, args=(stop,)) for taker in takers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# By library: the beginning and the end of the names of its tasks' locks in Redis.
NAMES = {
    "celery-dislock": ("dislock:", ":unique"),
    "celery-once": ("qo_", ""),
    "celery-singleton": ("SINGLETONLOCK_", ""),
    "celery-heimdall": ("h-lock:", ""),
}


def options_of(library: str, app: Celery, site: Site) -> dict[str, Any]:
    """Return the options of a library's task, whose key is an argument; sets up the app."""
    if library == "celery-once":
        from celery_once import QueueOnce  # noqa: PLC0415

        settings = {"url": site.url, "default_timeout": 60 * 60}
        app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": settings}
        return {"base": QueueOnce, "once": {"graceful": True, "keys": ["key"]}}
    if library == "celery-singleton":
        from celery_singleton import Singleton  # noqa: PLC0415

        app.conf.singleton_backend_url = site.url
        return {"base": Singleton, "unique_on": ["key"]}
    if library == "celery-heimdall":
        from celery_heimdall import HeimdallTask  # noqa: PLC0415

        client = redis.Redis.from_url(str(site.url))
        base = type("Unique", (HeimdallTask,), {"setup_redis": lambda _: client})
        return {"base": base, "heimdall": {"unique": True, "key": lambda args, _: args[0]}}
    app.conf.update(dislock_url=site.url, dislock_watchdog_timeout=site.timeout)
    Dislock(app)
    unique = {"lock_key": "<key>", "lock_unique_until": "end", "lock_on_conflict": "queue"}
    return {"base": SingletonTask, **unique, "lock_on_lost": "raise"}


def declare(library: str, site: Site) -> dict[str, Task]:
    """
    Make the app of a library, and return its tasks.

    A message is acknowledged *early*, as Celery does by default, and is gone when its process is
    killed; or *late*, and then it comes again.
    """
    app = Celery("peers", broker=site.broker, backend=site.results, set_as_current=False)
    app.conf.update(
        broker_connection_max_retries=None,
        broker_connection_retry_on_startup=True,
        broker_connection_timeout=2.0,
        broker_transport_options={"confirm_publish": True},
        worker_prefetch_multiplier=1,
    )

    def run(self: Task, key: str, lasts: float) -> None:
        history, about, task_id = history_of(site), name(), self.request.id
        history.add("task", task_id, "begin")
        history.add("hold", about, "begin", key=key, timeout=site.timeout)
        try:
            until = time.monotonic() + lasts
            while (at := time.monotonic()) < until:
                history.add("hold", about, "trust", at=at)
                time.sleep(STEP)
        except Exception as exc:
            history.add("hold", about, "lost", why=repr(exc))
            raise
        history.add("hold", about, "end", at=at)
        history.add("task", task_id, "end")

    options = {"bind": True, **options_of(library, app, site)}
    again = {"acks_late": True, "reject_on_worker_lost": True}
    return {
        "early": app.task(name="peers.early", **options)(run),
        "late": app.task(name="peers.late", **again, **options)(run),
    }


_histories: dict[int, History] = {}  # by process id: children of a pool are forked


def history_of(site: Site) -> History:
    """Return the history that this process writes."""
    pid = os.getpid()
    if pid not in _histories:
        _histories[pid] = History(Path(site.folder, "history"))
    return _histories[pid]


def work(library: str, site: Site) -> None:
    """Be a worker with two pool processes."""
    words = ["worker", "-c", "2", "-l", "INFO", "-n", f"{os.getpid()}@proof"]
    words += ["--dislock"] if library == "celery-dislock" else []
    declare(library, site)["late"].app.worker_main(words)


def send(library: str, site: Site, stop: threading.Event) -> None:
    """Send one task after the other."""
    tasks, chance, history = declare(library, site), random.Random(site.seed), history_of(site)
    while not stop.wait(chance.uniform(0, 2 * PAUSE)):
        kind = chance.choice(list(tasks))
        key = f"{kind}:{int(time.monotonic() / PERIOD)}:{chance.randrange(TASK_KEYS)}"
        task_id, asked = uuid.uuid4().hex, time.monotonic()
        lasts = chance.choice((*[0.01, 0.05] * 5, 2 * site.timeout))
        try:
            sent = tasks[kind].apply_async((key, lasts), task_id=task_id, retry_policy=AGAIN)
        except Exception as exc:  # noqa: BLE001 -- whatever the library raises
            history.add("task", task_id, "unknown", key=key, asked=asked, error=repr(exc))
            continue
        became = "sent" if sent.id == task_id else "refused"
        history.add("task", task_id, became, key=key, asked=asked)


def probe(library: str, site: Site) -> None:
    """Read keys that no task has any more, and print which are refused, and for how long."""
    tasks, (first, last) = declare(library, site), NAMES[library]
    with redis.Redis.from_url(str(site.url), decode_responses=True) as client:
        ttls = [client.pttl(one) / 1000 for one in client.scan_iter(f"{first}*{last}")]
    left = []
    for key in json.load(sys.stdin):
        task, task_id = tasks[key.partition(":")[0]], uuid.uuid4().hex
        if task.apply_async((key, 0.0), task_id=task_id).id != task_id:
            left.append(key)
    json.dump({"left": left, "seconds": ttls}, sys.stdout)


def main() -> None:
    """Do what the arguments say until the standard input ends."""
    what, library = sys.argv[1:]
    site, stop = Site.of_this_process(), threading.Event()
    if what == "probe":
        probe(library, site)
        return

    def wait_for_the_end() -> None:
        os.read(0, 1)  # not sys.stdin: a child that is forked meanwhile would wait for its mutex
        stop.set()
        if what == "work":
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    if what == "work":
        work(library, site)
    else:
        {"take": take_locks, "send": send}[what](library, site, stop)


if __name__ == "__main__":
    main()
