"""
Acquire and release an uncontended lock, one client over loopback TCP, beside redis-py's Lock.

Ours writes who holds the lock, hands out a fencing token and is kept by a running watchdog;
redis-py's sets a random value.  Both make a new lock object and a new owner each time, as a task
does.  To reach: at least 1.1 times as many pairs per second as redis-py (aim: 1.25), in two round
trips.

The floor is two PING round trips on a bare socket: no client can be faster than that.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.report import Row, ratios, take_turns
from celery_dislock.config.options import TaskOptions
from celery_dislock.locks.attempt import Attempt
from celery_dislock.locks.lease import Lease
from celery_dislock.locks.lock import Lock
from celery_dislock.locks.watchdog import Watchdog
from celery_dislock.servers.store import Store
from example_project.redis_server import RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import redis

LOOPBACK = "127.0.0.1"
TARGET = 1.1
AIM = 1.25
TIMEOUT = 30.0  # seconds
PAIRS = 250  # of acquire and release, in a round: some 30 ms
ROUNDS = 120
COUNTED = 200  # pairs whose commands are counted
PONG = 7  # bytes of the reply to PING


def run(folder: Path) -> list[Row]:
    with (
        RedisServer(folder) as server,
        server.client() as client,
        socket.create_connection((LOOPBACK, int(server.port or 0))) as wire,
    ):
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        store = Store(server.url)
        variants = {
            "ours": rate(ours(store)),
            "redis-py": rate(redis_py(client)),
            "floor": rate(two_pings(wire)),
        }
        take_turns(variants, 3)  # connections are made, scripts loaded, caches warm
        pairs = take_turns(variants, ROUNDS)
        commands = {
            "ours": commands_per_pair(client, ours(store)),
            "redis-py": commands_per_pair(client, redis_py(client)),
        }
        store.close()

    faster = ratios(pairs["ours"], pairs["redis-py"])
    speed = {name: median(figures) for name, figures in pairs.items()}
    return [
        Row(
            "acquire + release, pairs/s",
            f"{speed['ours']:,.0f}",
            "redis-py Lock",
            f"{speed['redis-py']:,.0f}",
            faster,
            f">= {TARGET} (aim {AIM})",
            reached=median(faster) >= TARGET,
        ),
        Row(
            "  the same, us each",
            f"{1e6 / speed['ours']:.0f}",
            "two bare PINGs",
            f"{1e6 / speed['floor']:.0f}",
            ratios(pairs["floor"], pairs["ours"]),
        ),
        Row(
            "  commands per pair",
            in_words(commands["ours"]),
            "redis-py Lock",
            in_words(commands["redis-py"]),
            target="2 evalsha",
            reached=commands["ours"] == {"evalsha": 2.0},
        ),
    ]


def ours(store: Store) -> Callable[[], None]:
    """One pair of ours, as a task's guard goes about it."""
    watchdog = Watchdog(store)
    watchdog.start()
    options = TaskOptions(lock_watchdog_timeout=TIMEOUT)
    holder = {"task": "shop.export", "id": "0" * 36, "worker": "celery@bench", "pid": 1}
    number = 0

    def pair() -> None:
        nonlocal number
        number += 1
        lock = Lock(["export:7"], ["dislock:{export:7}"], options, store, watchdog)
        lease = lock.try_acquire(Attempt(f"{holder['id']}@celery@bench:1/{number}", holder))
        assert isinstance(lease, Lease)
        assert lease.token
        lease.release()

    return pair


def redis_py(client: redis.Redis) -> Callable[[], None]:
    """One pair of redis-py's."""

    def pair() -> None:
        lock = client.lock("export:7", timeout=TIMEOUT)
        assert lock.acquire(blocking=False)
        lock.release()

    return pair


def two_pings(wire: socket.socket) -> Callable[[], None]:
    """Two round trips and nothing else."""

    def pair() -> None:
        for _ in range(2):
            wire.sendall(b"PING\r\n")
            received = 0
            while received < PONG:
                received += len(wire.recv(64))

    return pair


def rate(pair: Callable[[], None]) -> Callable[[], float]:
    """Make of a pair what measures pairs per second."""

    def measure() -> float:
        began = time.perf_counter()
        for _ in range(PAIRS):
            pair()
        return PAIRS / (time.perf_counter() - began)

    return measure


def commands_per_pair(client: redis.Redis, pair: Callable[[], None]) -> dict[str, float]:
    """Count the commands that a client sends; what a script calls is not sent by anyone."""
    sent: Counter[str] = Counter()
    pair()  # its connection is made before we count
    with client.monitor() as monitor:
        client.echo("begin")  # and so is this one
        for _ in range(COUNTED):
            pair()
        client.echo("end")
        while not monitor.next_command()["command"].startswith("ECHO"):
            pass
        while not (seen := monitor.next_command())["command"].startswith("ECHO"):
            if seen["client_type"] != "lua":
                sent[seen["command"].partition(" ")[0].lower()] += 1
    return {name: number / COUNTED for name, number in sent.items()}


def in_words(commands: dict[str, float]) -> str:
    return " + ".join(f"{number:g} {name}" for name, number in sorted(commands.items()))
