"""
Keep 10,000 leases alive in one process, beside bare EVALSHA and python-redis-lock.

Three processes run at once on one server, each taking its locks over the same ten seconds and
then doing nothing but renewing them, every ten seconds:

- ours: 10,000 leases of 30 s, renewed by one watchdog;
- bare: the same number of EVALSHA of the same script in pipelines, with nothing around them, which
  is the floor for any client in Python;
- python-redis-lock with ``auto_renewal``: 500 locks, a thread each.  It renews after two thirds of
  its expiry, so an expiry of 15 s makes it renew as often as ours.

CPU is each process's own, user and system time, over the window after they have settled.  A
renewal is as late as its answer comes after the instant it was due, a third of the timeout after
the one before was sent.  To reach: one watchdog thread, under 2 % of one core, nothing later than
1 s.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import redis
import redis_lock

from benchmarks.report import Row
from celery_dislock.config.options import TaskOptions
from celery_dislock.locks.lease import Attempt, Lease
from celery_dislock.locks.lock import Lock
from celery_dislock.locks.watchdog import BATCH, Watchdog
from celery_dislock.scripts import RENEW, milliseconds
from celery_dislock.servers.replies import Granted
from celery_dislock.servers.store import Store
from tests.redis_server import RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection
    from pathlib import Path

    from celery_dislock.exceptions import StoreError

LEASES = 10_000
PEER_LOCKS = 500
TIMEOUT = 30.0  # seconds
PEER_EXPIRE = 15  # seconds
INTERVAL = 10.0  # seconds between two renewals of a lease, for all three
SPREAD = 10.0  # seconds over which the locks are taken
SETTLE = 11.0  # seconds from then until the window: each lease has been renewed once
WINDOW = 30.0  # seconds: three renewals of each lease
STARTING = 30.0  # seconds that a process is given to import and connect
TARGET_CPU = 0.02  # of one core
TARGET_LATE = 1.0  # seconds


class Held(NamedTuple):
    """What a process says about its window.

    Attributes:
        cpu: Of one core.
        renewals: In the window.
        threads: Beside the main one.
        latest: Seconds after its due time of the latest renewal; None where it was not watched.
        lost: Leases that are not held at the end.
    """

    cpu: float
    renewals: int
    threads: int
    latest: float | None = None
    lost: int = 0

    @property
    def per_renewal(self) -> float:
        """Microseconds of CPU."""
        return self.cpu * WINDOW / self.renewals * 1e6


def run(folder: Path) -> list[Row]:
    with RedisServer(folder) as server:
        ours, bare, peer = in_processes(server.url, hold_ours, hold_bare, hold_peer)
    assert ours.latest is not None
    return [
        Row(
            f"CPU of {LEASES:,} leases, % of a core",
            f"{ours.cpu:.2%}",
            "bare EVALSHA",
            f"{bare.cpu:.2%}",
            [ours.cpu / bare.cpu],
            f"< {TARGET_CPU:.0%}",
            reached=ours.cpu < TARGET_CPU,
        ),
        Row(
            "  CPU per lease renewed, us",
            f"{ours.per_renewal:.1f}",
            "bare EVALSHA",
            f"{bare.per_renewal:.1f}",
            [ours.per_renewal / bare.per_renewal],
        ),
        Row(
            "",
            f"{ours.per_renewal:.1f}",
            f"python-redis-lock, {PEER_LOCKS}",
            f"{peer.per_renewal:.1f}",
            [ours.per_renewal / peer.per_renewal],
        ),
        Row(
            "  threads",
            str(ours.threads),
            f"python-redis-lock, {PEER_LOCKS}",
            str(peer.threads),
            target="1",
            reached=ours.threads == 1,
        ),
        Row(
            "  latest renewal, s after due",
            f"{ours.latest:.2f}",
            target=f"<= {TARGET_LATE:g}, none lost",
            reached=ours.latest <= TARGET_LATE and not ours.lost,
        ),
        Row(f"  renewals in {WINDOW:g} s", f"{ours.renewals:,}", "(bare)", f"{bare.renewals:,}"),
    ]


def in_processes(url: str, *holders: Callable[[str], Held]) -> list[Held]:
    """Run each holder in a process of its own, at the same time; none is left."""
    spawn = multiprocessing.get_context("spawn")  # a fork would inherit our memory and threads
    started = []
    try:
        for holder in holders:
            ours, theirs = spawn.Pipe(duplex=False)
            process = spawn.Process(target=_report, args=(holder, url, theirs), daemon=True)
            process.start()
            theirs.close()  # else we would wait for a process that has ended
            started.append((process, ours))
        answers = []
        for _, pipe in started:
            if not pipe.poll(STARTING + SPREAD + SETTLE + WINDOW):
                raise TimeoutError("a process that holds leases does not answer")
            answers.append(pipe.recv())
        return answers
    finally:
        for process, _ in started:
            process.terminate()
            process.join()


def _report(holder: Callable[[str], Held], url: str, pipe: Connection) -> None:
    pipe.send(holder(url))


def spread(number: int) -> Iterator[int]:
    """Count to *number* over the seconds of `SPREAD`."""
    began = time.monotonic()
    for i in range(number):
        ahead = began + SPREAD * i / number - time.monotonic()
        if ahead > 0:
            time.sleep(ahead)
        yield i


class Recording(Store):
    """A store that notes when which leases were renewed: one more call per batch of hundreds."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.batches: list[tuple[float, float, Sequence[tuple[Sequence[str], str, float]]]] = []

    def renew(
        self, leases: Sequence[tuple[Sequence[str], str, float]], *, within: float | None = None
    ) -> list[bool | str | StoreError]:
        """See `celery_dislock.servers.store.Store.renew`."""
        sent_at = time.monotonic()
        answers = super().renew(leases, within=within)
        self.batches.append((sent_at, time.monotonic(), leases))
        return answers

    def latest(self, acquired_at: dict[str, float]) -> float:
        """Return the lateness of the latest renewal until now; one that is missing counts."""
        renewed_at = dict(acquired_at)
        latest = 0.0
        for sent_at, answered_at, leases in self.batches:
            for (name,), _, _ in leases:
                latest = max(latest, answered_at - renewed_at[name] - INTERVAL)
                renewed_at[name] = sent_at
        return max(latest, time.monotonic() - min(renewed_at.values()) - INTERVAL)


def hold_ours(url: str) -> Held:
    store = Recording(url)
    watchdog = Watchdog(store)
    options = TaskOptions(lock_watchdog_timeout=TIMEOUT)
    leases: list[Lease] = []
    for i in spread(LEASES):
        key = f"many:{i}"
        lock = Lock([key], [f"dislock:{{{key}}}"], options, store, watchdog)
        owner = f"{i:036}@celery@bench:1/{i}"
        holder = {"task": "shop.export", "id": f"{i:036}", "worker": "celery@bench", "pid": 1}
        lease = lock.try_acquire(Attempt(owner, holder))
        assert isinstance(lease, Lease)
        leases.append(lease)
    time.sleep(SETTLE)
    before = sum(lease.renewals for lease in leases)
    cpu = cpu_over_window()
    return Held(
        cpu,
        sum(lease.renewals for lease in leases) - before,
        threading.active_count() - 1,
        store.latest({lease.lock.names[0]: lease.since for lease in leases}),
        sum(not lease.held for lease in leases),
    )


def hold_bare(url: str) -> Held:
    store = Store(url)
    owned = [(f"bare:{{{i}}}", f"{i:036}@celery@bench:1/{i}") for i in range(LEASES)]
    for i in spread(LEASES):
        assert isinstance(store.acquire([owned[i][0]], owned[i][1], TIMEOUT, "{}"), Granted)
    client = redis.Redis.from_url(url)
    sha = client.script_load(RENEW.text)
    connection = client.connection_pool.get_connection()
    batches = [owned[i : i + BATCH] for i in range(0, LEASES, BATCH)]
    ttl = milliseconds(TIMEOUT)
    renewals = 0
    stop = threading.Event()

    def renew() -> None:
        nonlocal renewals
        due = time.monotonic()
        while True:
            for batch in batches:
                due += INTERVAL / len(batches)
                if stop.wait(due - time.monotonic()):
                    return
                commands = [
                    connection.pack_command("EVALSHA", sha, 1, name, owner, ttl)
                    for name, owner in batch
                ]
                connection.send_packed_command([b"".join(map(b"".join, commands))])
                assert all(connection.read_response() == 1 for _ in batch)
                renewals += len(batch)

    thread = threading.Thread(target=renew)
    thread.start()
    time.sleep(SETTLE)
    before = renewals
    held = Held(cpu_over_window(), renewals - before, threading.active_count() - 1)
    stop.set()
    thread.join()
    return held


class CountingLock(redis_lock.Lock):  # type: ignore[misc]
    """python-redis-lock's lock, counting."""

    renewals: ClassVar[list[None]] = []  # of all locks; append() needs no mutex

    def extend(self, expire: int | None = None) -> None:
        """Renew the lock, as its thread does."""
        super().extend(expire)
        self.renewals.append(None)


def hold_peer(url: str) -> Held:
    client = redis.Redis.from_url(url)
    locks: list[Any] = []
    for i in spread(PEER_LOCKS):
        lock = CountingLock(client, f"many:{i}", expire=PEER_EXPIRE, auto_renewal=True)
        assert lock.acquire(blocking=False)
        locks.append(lock)
    time.sleep(SETTLE)
    before = len(CountingLock.renewals)
    cpu = cpu_over_window()
    return Held(cpu, len(CountingLock.renewals) - before, threading.active_count() - 1)


def cpu_over_window() -> float:
    """Sleep for the window, and return the share of a core that this process used meanwhile."""
    cpu, began = time.process_time(), time.monotonic()
    time.sleep(WINDOW)
    return (time.process_time() - cpu) / (time.monotonic() - began)
