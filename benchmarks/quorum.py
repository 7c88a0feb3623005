"""
Acquire and release a lock on five servers by majority, beside pottery's Redlock.

One client over loopback TCP and the same five servers for both, all of them up.  Ours writes who
holds the lock, hands out a fencing token and is kept by a running watchdog; pottery's sets a random
value, and asks each server in a thread of its own.  Both make a new lock object and a new owner
each time, as a task does.  To reach: at least as many pairs per second as pottery.

Beside our own lock on one server, the ratio says what the other four cost.
"""

from __future__ import annotations

import contextlib
import time
from statistics import median
from typing import TYPE_CHECKING

from pottery import Redlock

from benchmarks.acquire_release import new
from benchmarks.report import Row, ratios, take_turns
from celery_dislock import Dislock
from tests.redis_server import RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import redis

SERVERS = 5
TARGET = 1.0
TIMEOUT = 30.0  # seconds
PAIRS = 40  # of acquire and release, in a round
ROUNDS = 40


def run(folder: Path) -> list[Row]:
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(RedisServer(folder / f"server-{number}"))
            for number in range(SERVERS)
        ]
        clients = [stack.enter_context(server.client()) for server in servers]
        five = Dislock.from_url([server.url for server in servers])
        one = Dislock.from_url(servers[0].url)
        variants = {
            "five": rate(new(five)),
            "pottery": rate(pottery(clients)),
            "one": rate(new(one)),
        }
        take_turns(variants, 3)  # connections are made, scripts loaded, caches warm
        pairs = take_turns(variants, ROUNDS)
        # pottery does not wait for all servers, so its own may be left behind.
        assert not any(client.keys("dislock:*") for client in clients)
        five.close()
        one.close()

    faster = ratios(pairs["five"], pairs["pottery"])
    speed = {name: f"{median(figures):,.0f}" for name, figures in pairs.items()}
    return [
        Row(
            f"quorum of {SERVERS}, pairs/s",
            speed["five"],
            "pottery Redlock",
            speed["pottery"],
            faster,
            f">= {TARGET:g}",
            reached=median(faster) >= TARGET,
        ),
        Row(
            "  the same",
            speed["five"],
            "ours on one server",
            speed["one"],
            ratios(pairs["five"], pairs["one"]),
        ),
    ]


def pottery(clients: Sequence[redis.Redis]) -> Callable[[], None]:
    """One pair of pottery's."""

    def pair() -> None:
        lock = Redlock(key="export:7", masters=set(clients), auto_release_time=TIMEOUT)
        assert lock.acquire(blocking=False)
        lock.release()

    return pair


def rate(pair: Callable[[], None]) -> Callable[[], float]:
    """Make of a pair what measures pairs per second."""

    def measure() -> float:
        began = time.perf_counter()
        for _ in range(PAIRS):
            pair()
        return PAIRS / (time.perf_counter() - began)

    return measure
