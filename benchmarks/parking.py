"""
Park a task and hand the lock on to it, beside publishing and running one plain task.

A prefork worker with two slots runs tasks whose body does nothing, 1,000 in a run, in turns:

- plain: of Celery's own Task, without a lock, published while they run;
- straight: under 1,000 locks, a key each, so that each has its lock at once;
- parked: under one lock, which this process holds until they are parked; then each hands it on to
  the next.

Parking and handing on costs what a parked task takes more than one that passes straight: a delivery
more, the state PARKED, the ticket, the message published again.  Beside it stands all that a plain
task takes: publishing in this process, delivery, body and result in the worker.

CPU is that of all processes of the worker, and of this one where it publishes.  Commands are those
that clients send; the locks have a server of their own, so that what scripts carry out is told from
what Celery sends, and is shown by itself.

Latency is, in a parked run, from the end of a body, which is just before the release, to the
beginning of the next.  Beside it: from before ``apply_async`` to the beginning of the body of a
plain task in the idle worker, one at a time.

Memory is what all keys of the lock server take for 1,000 tasks in line, each less the length that
its message had in the queue.  The mark that a task is done, by which a late copy of its message is
known, is kept for two hours after it.

To reach: at most 2 times the plain task's CPU, commands and latency, and under 400 bytes.
"""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import redis

from benchmarks.recorded import ran, worker
from benchmarks.recorded_tasks import QUEUE, make_app
from benchmarks.report import Row, ratios
from tests.redis_server import RedisServer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.recorded import Recorded

TASKS = 1_000
ROUNDS = 7
SINGLE = 100  # plain tasks in a round, one at a time
SLOTS = 2
RUN_LIMIT = 90.0  # seconds until a run counts as failed
SETTLE = 0.5  # seconds for what comes after the last body: result, release, acknowledgement
IDLE = 0.02  # seconds for the same of one task
TARGET = 2.0
TARGET_BYTES = 400
SCRIPTS = ("eval", "evalsha")
MARK = b":done:"  # in the name of what tells that a task is done
OURS = ("info", "config", "rpush", "scan", "memory")  # that only this benchmark sends


class Cost(NamedTuple):
    """
    What a task of a run took.

    Attributes:
        cpu: Milliseconds.
        commands: That clients sent.
        inner: Commands of scripts.
    """

    cpu: float
    commands: float
    inner: float


class Bench:
    """
    The runs.

    Args:
        recorded: The worker.
        broker: A client of its broker and results.
        aside: URL of another database there, whose queue nobody reads.
        locks: A client of its lock server.

    Attributes:
        hand_offs: Seconds from a body's end to the next one's beginning, a median for each run.
        in_line: Bytes for a task in line beside its message, for each run.
        message: Bytes of a message in the queue.
    """

    def __init__(
        self, recorded: Recorded, broker: redis.Redis, aside: str, locks: redis.Redis
    ) -> None:
        self.hand_offs: list[float] = []
        self.in_line: list[float] = []
        self.message = 0.0
        self._recorded = recorded
        self._plain = recorded.app.tasks["plain"]
        self._broker = broker
        self._aside = aside
        self._aside_app = make_app(aside, recorded.lock_url)
        self._locks = locks
        self._runs = 0

    def plain(self) -> Cost:
        """Publish plain tasks, and run them."""
        self._runs += 1
        before = self._begin()
        own = time.process_time()
        for n in range(TASKS):
            self._plain.apply_async((f"{self._runs}:{n}",))
        own = time.process_time() - own
        self._recorded.until(lambda noted: len(ran(noted)) >= TASKS, RUN_LIMIT)
        return self._cost(before - own)

    def straight(self) -> Cost:
        """Run tasks of which each has a lock of its own."""
        self._runs += 1
        messages = self._messages([f"{self._runs}:{n}" for n in range(TASKS)])
        before = self._begin()
        self._broker.rpush(QUEUE, *messages)
        self._recorded.until(lambda noted: len(ran(noted)) >= TASKS, RUN_LIMIT)
        return self._cost(before)

    def parked(self) -> Cost:
        """Park tasks of one key, and let them hand the lock on to one another."""
        self._runs += 1
        key = f"parked-{self._runs}"  # a colon would be encoded in a task's key
        messages = self._messages([key] * TASKS)
        self.message = sum(map(len, messages)) / TASKS
        with self._recorded.app.dislock.lock(key):
            without = self._memory()
            before = self._begin()
            self._broker.rpush(QUEUE, *messages)
            self._recorded.until(lambda noted: len(noted) >= TASKS, RUN_LIMIT)
            self.in_line.append((self._memory() - without) / TASKS - self.message)
        noted = self._recorded.until(lambda noted: len(ran(noted)) >= TASKS, RUN_LIMIT)
        assert len(noted) == TASKS, f"{len(noted) - TASKS} turns were given twice"
        turns = sorted((d.body_began or 0.0, d.body_ended or 0.0) for d in noted)
        self.hand_offs.append(median(two[0] - one[1] for one, two in pairwise(turns)))
        return self._cost(before)

    def single(self) -> float:
        """Publish plain tasks, each when the one before has ended; return the median in seconds."""
        self._runs += 1
        took = []
        for n in range(SINGLE):
            sent_at = time.monotonic()
            self._plain.apply_async((f"{self._runs}:{n}",))
            (delivery,) = self._recorded.until(bool, RUN_LIMIT)
            took.append((delivery.body_began or 0.0) - sent_at)
            time.sleep(IDLE)
        return median(took)

    def mark(self) -> float:
        """Return the bytes that are kept for a task that is done."""
        return self._memory(marks=True) / (len(self.in_line) * TASKS)

    def _messages(self, keys: Sequence[str]) -> list[bytes]:
        """Publish tasks where nobody reads them; return their messages."""
        with self._aside_app.producer_pool.acquire(block=True) as producer:
            for key in keys:
                self._aside_app.tasks["queue"].apply_async((key,), producer=producer)
        with redis.Redis.from_url(self._aside) as client:
            messages: list[bytes] = client.lrange(QUEUE, 0, -1)
            client.delete(QUEUE)
        return messages

    def _memory(self, *, marks: bool = False) -> int:
        """Return the bytes of what the lock server keeps: marks of what is done, or the rest."""
        pipeline = self._locks.pipeline(transaction=False)
        for name in self._locks.scan_iter(count=TASKS):
            if (MARK in name) == marks:
                pipeline.memory_usage(name, samples=0)
        return sum(pipeline.execute())

    def _begin(self) -> float:
        self._broker.config_resetstat()
        self._locks.config_resetstat()
        return self._recorded.cpu()

    def _cost(self, before: float) -> Cost:
        time.sleep(SETTLE)
        cpu = self._recorded.cpu() - before
        sent, of_scripts = commands(self._broker), commands(self._locks)
        scripts = sum(of_scripts.pop(name, 0) for name in SCRIPTS)
        return Cost(
            cpu * 1e3 / TASKS,
            (sum(sent.values()) + scripts) / TASKS,
            sum(of_scripts.values()) / TASKS,
        )


def commands(client: redis.Redis) -> Counter[str]:
    """Return how often each command was carried out, without those that only we send."""
    counted: Counter[str] = Counter()
    for name, stats in client.info("commandstats").items():
        command = name.removeprefix("cmdstat_").partition("|")[0]
        if command not in OURS:
            counted[command] += stats["calls"]
    return counted


def run(folder: Path) -> list[Row]:
    with (
        RedisServer(folder / "broker") as broker,
        RedisServer(folder / "locks") as locks,
        broker.client() as client,
        locks.client() as lock_client,
        worker(folder, broker.url, locks.url, SLOTS) as recorded,
    ):
        bench = Bench(recorded, client, f"{broker.url.removesuffix('0')}1", lock_client)
        variants = {
            "plain": bench.plain,
            "straight": bench.straight,
            "parked": bench.parked,
        }
        costs: dict[str, list[Cost]] = {name: [] for name in variants}
        singles = []
        for _ in range(ROUNDS):
            for name, variant in variants.items():
                costs[name].append(variant())
            singles.append(bench.single())
        mark = bench.mark()
    plain = costs["plain"]
    added = [
        Cost(*(whole - part for whole, part in zip(parked, straight, strict=True)))
        for parked, straight in zip(costs["parked"], costs["straight"], strict=True)
    ]
    hand_offs = [1e3 * seconds for seconds in bench.hand_offs]
    in_line = median(bench.in_line)
    return [
        beside(
            "parking and handing on, CPU ms",
            [cost.cpu for cost in added],
            [cost.cpu for cost in plain],
        ),
        beside(
            "  commands that clients send",
            [cost.commands for cost in added],
            [cost.commands for cost in plain],
        ),
        Row("  commands of scripts", f"{median(cost.inner for cost in added):.1f}"),
        beside(
            "  release to next body, ms",
            hand_offs,
            [1e3 * seconds for seconds in singles],
            "apply_async to body",
        ),
        Row(
            "  memory in line, bytes",
            f"{in_line:.0f}",
            "(its message)",
            f"{bench.message:.0f}",
            target=f"< {TARGET_BYTES}",
            reached=in_line < TARGET_BYTES,
        ),
        Row("  memory for 2 h when done, bytes", f"{mark:.0f}"),
    ]


def beside(
    measured: str, ours: Sequence[float], peers: Sequence[float], peer: str = "plain task"
) -> Row:
    factors = ratios(ours, peers)
    return Row(
        measured,
        f"{median(ours):.2f}",
        peer,
        f"{median(peers):.2f}",
        factors,
        f"<= {TARGET:g}",
        reached=median(factors) <= TARGET,
    )
