"""
Acquire and release a shared, a counted and a rated lock, uncontended, beside an exclusive one.

The same code takes all, in plain Python, one client over loopback TCP.  To reach: shared
and counted take at most 1.3 times as long as exclusive.  Most of that time is the client's and
the kernel's, alike for all; what the server itself takes for a pair stands below, without a target.
"""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.report import Row, ratios, take_turns
from celery_dislock import Dislock
from tests.redis_server import RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import redis

    from celery_dislock.locks.reentrant import ReentrantLock

KINDS: dict[str, dict[str, Any]] = {
    "exclusive": {},
    "shared": {"mode": "shared"},
    "limit 5": {"limit": 5},
    "rate": {"rate": "999999/s", "limit": 1},  # which never refuses
}
TARGET = 1.3
PAIRS = 250  # of acquire and release, in a round: some 40 ms
ROUNDS = 100


def run(folder: Path) -> list[Row]:
    with RedisServer(folder) as server, server.client() as client:
        dislock = Dislock.from_url(server.url)
        served: dict[str, list[float]] = {kind: [] for kind in KINDS}
        variants = {
            kind: pairs(dislock.lock(f"export:{kind}", **options), client, served[kind])
            for kind, options in KINDS.items()
        }
        take_turns(variants, 3)  # connections are made, scripts loaded, caches warm
        for figures in served.values():
            figures.clear()
        took = take_turns(variants, ROUNDS)
    return [*rows("acquire + release, {}, us", took, TARGET), *rows("  of the server's", served)]


def pairs(lock: ReentrantLock, client: redis.Redis, served: list[float]) -> Callable[[], float]:
    """Make what measures microseconds per pair, and notes the server's own."""

    def measure() -> float:
        before = evalsha_time(client)
        began = time.perf_counter()
        for _ in range(PAIRS):
            assert lock.acquire(blocking=False)
            lock.release()
        took = time.perf_counter() - began
        served.append((evalsha_time(client) - before) / PAIRS)
        return 1e6 * took / PAIRS

    return measure


def evalsha_time(client: redis.Redis) -> float:
    """Return the microseconds that the server has spent in scripts."""
    return float(client.info("commandstats").get("cmdstat_evalsha", {"usec": 0})["usec"])


def rows(measured: str, took: dict[str, list[float]], target: float | None = None) -> Iterator[Row]:
    exclusive, *others = took
    for kind in others:
        factors = ratios(took[kind], took[exclusive])
        yield Row(
            measured.format(kind),
            f"{median(took[kind]):.1f}",
            exclusive,
            f"{median(took[exclusive]):.1f}",
            factors,
            "" if target is None else f"<= {target}",
            reached=None if target is None else median(factors) <= target,
        )
