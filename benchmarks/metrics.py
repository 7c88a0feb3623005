"""
Run a locked task that does nothing with and without metrics, and with Celery's events.

Four prefork workers run beside each other, one for each combination of `dislock_metrics` and `-E`,
and only one has work at a time.  Celery's own events (received, started, succeeded) cost what they
cost without locks, too, so metrics with events are compared with events alone.  To reach: at least
98 % of the rate without metrics.

The rate of a round depends on what else the machine does.  So the processor time of the worker and
its pool per task is told, too.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import TYPE_CHECKING

import psutil

from benchmarks.processes import processor_time, started
from benchmarks.report import Row, ratios, take_turns
from tests.redis_server import RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import redis

TARGET = 0.98
KINDS = ("plain", "metrics", "events", "metrics-events")  # queues, and the settings of the workers
MARKS = "marks"  # a list: when the marking tasks ran
MESSAGES = 1000  # tasks in a round
ROUNDS = 30
PROCESSES = 2  # of a pool
STARTING = 30.0  # seconds that a worker is given to start
ROUND_LIMIT = 120.0  # seconds until a round counts as failed


def run(folder: Path) -> list[Row]:
    with ExitStack() as stack:
        server = stack.enter_context(RedisServer(folder))
        client = stack.enter_context(server.client(socket_timeout=ROUND_LIMIT))
        os.environ["METRICS_BENCH_REDIS"] = server.url
        publish_once(client)
        with ExitStack() as workers:  # at its end, they hand in what they have counted
            spent: dict[str, list[float]] = {kind: [] for kind in KINDS}
            variants = {
                kind: rate(
                    client, kind, workers.enter_context(worker(folder, client, kind)), spent[kind]
                )
                for kind in KINDS
            }
            take_turns(variants, 3)
            figures = take_turns(variants, ROUNDS)
        counted = sum(
            int(number)
            for name in client.scan_iter("dislock:metrics:*:of:*")
            for field, number in client.hgetall(name).items()
            if field.startswith(b"acquisitions ")
        )
    rounds = sum(map(len, figures.values())) // len(KINDS) + 3
    assert counted == 2 * rounds * MESSAGES, f"{counted} tasks were counted"

    speed = {kind: f"{median(figures[kind]):,.0f}" for kind in KINDS}
    return [
        row(figures, speed, "no-op task with metrics, tasks/s", "metrics", "plain"),
        row(figures, speed, "  the same, both with -E", "metrics-events", "events"),
        time_row(spent, "processor time per task, ms", "metrics", "plain"),
        time_row(spent, "  the same, both with -E", "metrics-events", "events"),
        Row(
            "  (-E alone, tasks/s)",
            speed["events"],
            "neither",
            speed["plain"],
            ratios(figures["events"], figures["plain"]),
        ),
    ]


def row(
    figures: dict[str, list[float]], speed: dict[str, str], what: str, ours: str, without: str
) -> Row:
    of_rounds = ratios(figures[ours], figures[without])
    reached = median(of_rounds) >= TARGET
    return Row(
        what, speed[ours], "without", speed[without], of_rounds, f">= {TARGET}", reached=reached
    )


def time_row(spent: dict[str, list[float]], what: str, ours: str, without: str) -> Row:
    of_rounds = ratios(spent[ours], spent[without])
    reached = median(of_rounds) <= 1 / TARGET
    figure = {kind: f"{median(spent[kind]) * 1000:.3f}" for kind in (ours, without)}
    target = f"<= {1 / TARGET:.2f}"
    return Row(what, figure[ours], "without", figure[without], of_rounds, target, reached=reached)


def publish_once(client: redis.Redis) -> None:
    """Publish what a round consists of, and keep it aside for each kind."""
    from benchmarks import metrics_tasks  # noqa: PLC0415  # reads the server's address

    for kind in KINDS:
        with metrics_tasks.app.producer_pool.acquire(block=True) as producer:
            metrics_tasks.mark.apply_async(producer=producer, queue=kind)
            for n in range(MESSAGES):
                metrics_tasks.locked.apply_async((n,), producer=producer, queue=kind)
            metrics_tasks.mark.apply_async(producer=producer, queue=kind)
        client.rename(kind, f"stock:{kind}")
    metrics_tasks.app.close()


@contextmanager
def worker(folder: Path, client: redis.Redis, kind: str) -> Iterator[int]:
    """Run the worker of a kind; give its process id when it takes tasks.  Stopped in the end."""
    from benchmarks import metrics_tasks  # noqa: PLC0415  # as above

    command = [sys.executable, "-m", "celery", "-A", "benchmarks.metrics_tasks", "worker"]
    command += ["--dislock", "--pool", "prefork", "--concurrency", str(PROCESSES)]
    command += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    command += ["--loglevel", "WARNING", "-n", f"{kind}@bench", "-Q", kind]
    command += ["-E"] if "events" in kind else []
    log = folder / f"{kind}.log"
    with started(command, log, METRICS_BENCH_QUEUE=kind) as process:
        metrics_tasks.mark.apply_async(queue=kind)
        if client.blpop([MARKS], timeout=STARTING) is None:
            raise RuntimeError(f"the worker does not start:\n{log.read_text()}")
        yield process.pid


def rate(client: redis.Redis, kind: str, pid: int, spent: list[float]) -> Callable[[], float]:
    """Make what runs one round of a kind, and returns its tasks per second.

    What a task of the round has cost, in seconds of processor time, is added to *spent*.
    """
    messages = client.lrange(f"stock:{kind}", 0, -1)

    def measure() -> float:
        # Consumed from the right; LRANGE gave the message that was published last first.
        before = processor_time(psutil.Process(pid))
        client.rpush(kind, *messages)
        marks = []
        for _ in range(2):
            answer = client.blpop([MARKS], timeout=ROUND_LIMIT)
            assert answer is not None, f"a round of {kind} does not end"
            marks.append(float(answer[1]))
        spent.append((processor_time(psutil.Process(pid)) - before) / MESSAGES)
        return MESSAGES / abs(marks[1] - marks[0])

    return measure
