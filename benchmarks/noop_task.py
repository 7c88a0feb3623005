"""
Run a task that does nothing, locked and unlocked, in one prefork worker with a Redis broker.

With nothing in the body, what is left is Celery's own cost and the lock's.  Beside them runs the
lock that people write by hand: SET NX and a release script in the body.  Each task has a key of
its own, so no lock is ever in the way.  To reach: at least 95 % of the unlocked task's rate.

Each message is published once, before anything is measured.  A round puts a copy of all messages
of one kind into the worker's queue, in one command, with a task before and after them that notes
the time; so neither publishing nor a start of the worker is in the figure.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.report import Row, ratios, take_turns
from example_project.redis_server import RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import redis

TARGET = 0.95
KINDS = ("unlocked", "locked", "by_hand")
MARKS = "marks"  # a list: when the marking tasks ran
MESSAGES = 500  # tasks in a round: less than half a second
ROUNDS = 40
PROCESSES = 2  # of the pool
SCRIPTS = 2  # that a locked task runs: acquire and release
STARTING = 30.0  # seconds that the worker is given to start
ROUND_LIMIT = 120.0  # seconds until a round counts as failed
STOPPING = 15.0  # seconds that the worker is given to stop
ROOT = Path(__file__).parents[1]


def run(folder: Path) -> list[Row]:
    with RedisServer(folder) as server, server.client() as client:
        os.environ["NOOP_TASK_REDIS"] = server.url
        publish_once(client)
        with worker(folder, client):
            variants = {kind: rate(client, kind) for kind in KINDS}
            take_turns(variants, 3)
            figures = take_turns(variants, ROUNDS)
            scripts = scripts_per_task(client, variants["locked"])
        leftover = [*client.scan_iter("dislock:*"), *client.scan_iter("noop-by-hand:*")]
    assert scripts >= SCRIPTS, f"{scripts} scripts per task: the locked task took no lock"
    assert not leftover, f"{len(leftover)} locks are left, such as {leftover[0]!r}"

    speed = {kind: median(figures[kind]) for kind in KINDS}
    ours = ratios(figures["locked"], figures["unlocked"])
    by_hand = ratios(figures["by_hand"], figures["unlocked"])
    return [
        Row(
            "no-op task locked, tasks/s",
            f"{speed['locked']:,.0f}",
            "unlocked",
            f"{speed['unlocked']:,.0f}",
            ours,
            f">= {TARGET}",
            reached=median(ours) >= TARGET,
        ),
        Row(
            "  beside a lock by hand, tasks/s",
            f"{speed['locked']:,.0f}",
            "SET NX + script",
            f"{speed['by_hand']:,.0f}",
            ratios(figures["locked"], figures["by_hand"]),
        ),
        Row(
            "  (the lock by hand, tasks/s)",
            f"{speed['by_hand']:,.0f}",
            "unlocked",
            f"{speed['unlocked']:,.0f}",
            by_hand,
        ),
    ]


def publish_once(client: redis.Redis) -> None:
    """Publish what each kind of round consists of, and keep it aside under the kind's name."""
    from benchmarks import noop_tasks  # noqa: PLC0415  # reads the server's address

    with noop_tasks.app.producer_pool.acquire(block=True) as producer:
        for kind in KINDS:
            noop_tasks.mark.apply_async(producer=producer)
            for n in range(MESSAGES):
                getattr(noop_tasks, kind).apply_async((n,), producer=producer)
            noop_tasks.mark.apply_async(producer=producer)
            client.rename("noop", stock(kind))
    noop_tasks.app.close()


def stock(kind: str) -> str:
    return f"stock:{kind}"


@contextmanager
def worker(folder: Path, client: redis.Redis) -> Iterator[None]:
    """Run the worker, and wait until it takes tasks; it is stopped in the end."""
    from benchmarks import noop_tasks  # noqa: PLC0415  # as above

    command = [sys.executable, "-m", "celery", "-A", "benchmarks.noop_tasks", "worker"]
    command += ["--dislock", "--pool", "prefork", "--concurrency", str(PROCESSES)]
    command += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    command += ["--loglevel", "WARNING"]
    log = folder / "worker.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        noop_tasks.mark.delay()
        if client.blpop([MARKS], timeout=STARTING) is None:
            raise RuntimeError(f"the worker does not start:\n{log.read_text()}")
        yield
    finally:
        process.terminate()
        try:
            process.wait(STOPPING)
        finally:
            process.kill()
            process.wait()


def rate(client: redis.Redis, kind: str) -> Callable[[], float]:
    """Make what runs one round of a kind and returns its tasks per second."""
    messages = client.lrange(stock(kind), 0, -1)

    def measure() -> float:
        # Consumed from the right; LRANGE gave the message that was published last first.
        client.rpush("noop", *messages)
        marks = []
        for _ in range(2):
            answer = client.blpop([MARKS], timeout=ROUND_LIMIT)
            assert answer is not None, f"a round of {kind} does not end"
            marks.append(float(answer[1]))
        return MESSAGES / abs(marks[1] - marks[0])

    return measure


def scripts_per_task(client: redis.Redis, measure: Callable[[], float]) -> float:
    """Count the scripts that the server runs for a task of one more round."""
    client.config_resetstat()
    measure()
    calls: int = client.info("commandstats")["cmdstat_evalsha"]["calls"]
    return calls / MESSAGES
