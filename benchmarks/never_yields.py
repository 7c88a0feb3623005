"""
Run bodies that keep their process's watchdog from running, and see how long their locks last.

A body of three timeouts computes without yielding, in workers of gevent and eventlet, or holds the
GIL, in a prefork worker.  Meanwhile the lock's time to live is read from Redis over and over.  The
figure is the longest time without a renewal, in timeouts: a renewal is due after a third, and at
1 the lock is lost.  Beside it runs python-redis-lock with ``auto_renewal``, which renews in a
thread, and is a greenlet where gevent or eventlet has patched threads.

A library that is not installed has no row.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.report import Row
from example_project.redis_server import RedisServer

if TYPE_CHECKING:
    from collections.abc import Iterator

    import redis

TARGET = 1.0  # timeouts
WAYS = (("compute", "gevent"), ("compute", "eventlet"), ("hold_the_gil", "prefork"))
LOCKS = {"ours": "dislock:{{{}}}", "theirs": "lock:{}"}  # kind of task -> name of its lock
POLL = 0.02  # seconds between two looks at the lock
STARTING = 30.0  # seconds that a worker is given to start, and a body to begin
BODY_LIMIT = 60.0  # seconds until a body counts as failed
STOPPING = 15.0  # seconds that a worker is given to stop
ROOT = Path(__file__).parents[1]


def run(folder: Path) -> list[Row]:
    rows = []
    with RedisServer(folder) as server, server.client() as client:
        os.environ["NEVER_YIELDS_REDIS"] = server.url
        for body, pool in WAYS:
            if pool != "prefork" and find_spec(pool) is None:
                continue
            with worker(folder, pool):
                kept = {kind: longest_without_renewal(client, kind, body) for kind in LOCKS}
            rows.append(
                Row(
                    f"{body.replace('_', ' ')}, {pool}: longest without a renewal, timeouts",
                    shown(kept["ours"]),
                    "python-redis-lock",
                    shown(kept["theirs"]),
                    target=f"< {TARGET:g}",
                    reached=kept["ours"] < TARGET,
                )
            )
    return rows


def shown(timeouts: float) -> str:
    return f"{timeouts:.2f}" if timeouts < 1 else "lost"


def longest_without_renewal(client: redis.Redis, kind: str, body: str) -> float:
    """Run one body, and return the longest time for which its lock was not renewed, in timeouts."""
    from benchmarks import never_yields_tasks as tasks  # noqa: PLC0415  # reads the server's address

    name = LOCKS[kind].format(body)
    getattr(tasks, kind).delay(body)
    limit = time.monotonic() + STARTING
    while not client.exists(name):
        assert time.monotonic() < limit, f"the task {kind!r} took no lock"
        time.sleep(POLL)
    limit, longest = time.monotonic() + BODY_LIMIT, 0.0
    while not client.exists(tasks.ENDS):
        assert time.monotonic() < limit, f"the body of {kind!r} does not end"
        left = max(client.pttl(name), 0) / 1000  # negative if the lock is gone
        if not client.exists(tasks.ENDS):
            longest = max(longest, 1 - left / tasks.TIMEOUT)
        time.sleep(POLL)
    client.delete(tasks.ENDS)
    return longest


@contextmanager
def worker(folder: Path, pool: str) -> Iterator[None]:
    """Run a worker of this pool, and stop it in the end."""
    command = [sys.executable, "-W", "ignore", "-m", "celery", "-A"]
    command += ["benchmarks.never_yields_tasks", "worker"]
    command += ["--dislock", "--pool", pool, "--concurrency", "2", "--loglevel", "WARNING"]
    command += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    with (folder / f"{pool}.log").open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(STOPPING)
        finally:
            process.kill()
            process.wait()
