"""
Rates and several limits in line, beside what people write by hand and Celery's own `rate_limit`.

By hand is a sorted set with the starts of the last second, asked in the body's first line, which
sends the task again where it is too early: ``self.retry(countdown=...)`` with the time that the
script says.  `rate_limit` counts in each worker, so each has its share.

- A rate that refuses nobody: the task that does nothing, as `benchmarks.tasks` measures it, with
  one key for all tasks where there is a rate.
- 200 starts a second: 1,000 tasks, and four workers with two processes each.  Ours are parked
  before, while the key is paused.  The peers have no line: theirs come into the queue at once.  All
  are counted on one clock: ours by its fencing token, which is when the server counted it.  A task
  could start a second after the one 200 starts before it; the first 200 are left out.  Celery's
  `rate_limit` comes last, and is left alone after a minute.
- What the machine can do: 200 tasks without a lock that have one ETA, after that time.
- Several keys: the same workers, and 20 tenants whose tasks come in turn.  The server's time is
  that of all scripts, by its own account, on a server that has nothing but locks.
- Parked tasks and starts by themselves: see `benchmarks.flow_lines`.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import redis
from celery import Celery
from click.testing import CliRunner

from benchmarks import flow_lines, tasks
from benchmarks.locks import OURS
from benchmarks.measuring import Figure, percentile
from benchmarks.processes import started
from benchmarks.report import take_turns
from celery_dislock.operating.cli import dislock
from tests.redis_server import RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

AT_ONCE = "a plain task, 200 of one ETA"
RATED, PACED, KEYS = "A rate that refuses nobody", "200 starts a second", "Several keys in line"
BY_HAND, CELERYS = "sliding window", "rate_limit"
NEVER = (tasks.FLOOR, tasks.OURS, f"{OURS}, lock_rate", BY_HAND, CELERYS)
NETWORK = "0 ms"
ROUNDS = 9
PARKED = 1_000  # tasks; at 200 a second they take 5 seconds
PACED_ROUNDS = 3
TENANTS = 20
QUEUED = 400  # tasks of a round, for several keys
KEYS_ROUNDS = 5
SECOND = 1_000_000  # microseconds
STARTING, ENDING = 60.0, 120.0  # seconds until workers, and a round, count as failed
AHEAD = 3.0  # seconds
A_MINUTE = 60.0
LOOK_EVERY = 0.02  # seconds


def measure(folder: Path) -> list[Figure]:
    return [
        *of_tasks(folder / "tasks"),
        *of_fleet(folder / "fleet"),
        *flow_lines.measure(folder / "lines"),
    ]


def of_tasks(folder: Path) -> list[Figure]:
    with ExitStack() as stack:
        server = stack.enter_context(RedisServer(folder))
        client = stack.enter_context(server.client(socket_timeout=None))
        rounds = {}
        for variant in NEVER:
            tasks.send(variant, server.url, tasks.TASKS)
            rounds[variant] = tasks.rate(client, variant, client.lrange(variant, 0, -1)[::-1])
            client.delete(variant)
        for variant in NEVER:
            stack.enter_context(tasks.worker(variant, server.url, folder))
        take_turns(rounds, 2)  # connections are made, scripts loaded, caches warm
        return [
            Figure(RATED, "tasks/s", variant, NETWORK, values)
            for variant, values in take_turns(rounds, ROUNDS).items()
        ]


class Paced(NamedTuple):
    """
    What came out of a round with a rate.

    Attributes:
        late: Milliseconds of each start after the time at which it could be.
        most: Starts in any window of a second.
        rate: Starts a second, from the first to the last.
    """

    late: list[float]
    most: int
    rate: float

    @classmethod
    def of(cls, starts: Sequence[int], most: int) -> Paced:
        """Tell it by the times of the starts in microseconds, and the rate."""
        ranked = sorted(starts)
        late = [
            max(0, after - before - SECOND) / 1e3
            for before, after in zip(ranked, ranked[most:], strict=False)
        ]
        first, window = 0, 0
        for nth, one in enumerate(ranked):
            while one - ranked[first] >= SECOND:
                first += 1
            window = max(window, nth - first + 1)
        return cls(late, window, len(ranked) / (ranked[-1] - ranked[0]) * SECOND)


class Kept(NamedTuple):
    """What came out of a round in line: tasks per second, scripts per task, and us of each."""

    rate: float
    scripts: float
    script: float


class Fleet:
    """
    Four workers, what they run, and the servers.

    Args:
        broker: Has the messages and the times of the starts.
        locks: Has the locks and the rates, and nothing else.
    """

    def __init__(self, broker: RedisServer, locks: RedisServer) -> None:
        from benchmarks import flow_tasks  # noqa: PLC0415  # reads the servers' addresses

        self.module: Any = flow_tasks
        self._broker = broker.client(socket_timeout=None)
        self._locks: redis.Redis = locks.client()
        # Messages are written in another database, and come into the queue in one command.
        url = broker.url.removesuffix("0") + "1"
        self._sender = Celery(broker=url, set_as_current=False)
        self._written: redis.Redis = redis.Redis.from_url(url)

    def paced(self, task: Any, *, parks: bool = False) -> Callable[[], Paced]:
        """Make what runs a round of a task that has a rate."""

        def measure() -> Paced:
            if not parks:
                self._put([(task, n) for n in range(PARKED)])
            else:
                self._command("pause", "paced")
                self._put([(task, n) for n in range(PARKED)])
                _until(lambda: self._locks.zcard("dislock:{paced}:line") >= PARKED, ENDING)
                self._command("resume", "paced")
            return Paced.of(self._starts(PARKED), self.module.MOST)

        return measure

    def limited(self) -> Paced:
        """Run Celery's rate for a minute at most."""
        self._put([(self.module.limited, n) for n in range(PARKED)])
        with suppress(AssertionError):
            _until(lambda: self._broker.llen(self.module.STARTS) >= PARKED, A_MINUTE)
        return Paced.of(self._started(), self.module.MOST)

    def at_once(self) -> Paced:
        """Run as many tasks as start in a second, all at one time; they are late after that."""
        most, eta = self.module.MOST, datetime.now(timezone.utc) + timedelta(seconds=AHEAD)
        self._put([(self.module.plain, n) for n in range(most)], eta=eta)
        starts = sorted(self._starts(most))
        late = [one / 1e3 - eta.timestamp() * 1e3 for one in starts]
        return Paced(late, most, most / (starts[-1] - starts[0]) * SECOND)

    def queued(self, task: Any) -> Callable[[], Kept]:
        """Make what runs a round of a task that waits in line."""

        def measure() -> Kept:
            self._locks.config_resetstat()
            began = time.monotonic()
            self._put([(task, n % TENANTS) for n in range(QUEUED)])
            self._starts(QUEUED)
            took = time.monotonic() - began
            ran = self._locks.info("commandstats")["cmdstat_evalsha"]
            return Kept(QUEUED / took, ran["calls"] / QUEUED, ran["usec_per_call"])

        return measure

    def wait_for_workers(self) -> None:
        """Wait until all are there, and each has run something."""
        app = self.module.app
        _until(lambda: len(app.control.ping(timeout=1.0)) >= self.module.WORKERS, STARTING)

    def _put(self, calls: Sequence[tuple[Any, int]], **options: Any) -> None:
        queue = self.module.QUEUE
        self._broker.delete(self.module.STARTS)
        for task, n in calls:
            self._sender.send_task(task.name, (n,), queue=queue, **options)
        messages = self._written.lrange(queue, 0, -1)[::-1]
        self._written.delete(queue)
        assert len(messages) == len(calls)
        self._broker.lpush(queue, *messages)  # they are taken from the right

    def _starts(self, number: int) -> list[int]:
        _until(lambda: self._broker.llen(self.module.STARTS) >= number, ENDING)
        found = self._started()
        assert len(found) == number, "a task ran twice"
        return found

    def _started(self) -> list[int]:
        return list(map(int, self._broker.lrange(self.module.STARTS, 0, -1)))

    def _command(self, *words: str) -> None:
        answer = CliRunner().invoke(dislock, words, obj=SimpleNamespace(app=self.module.app))
        assert answer.exit_code == 0, answer.output


def _until(holds: Callable[[], bool], limit: float) -> None:
    deadline = time.monotonic() + limit
    while not holds():
        assert time.monotonic() < deadline, "a round does not end"
        time.sleep(LOOK_EVERY)


@contextmanager
def fleet(folder: Path) -> Iterator[Fleet]:
    """Run the workers; they are stopped in the end."""
    with (
        RedisServer(folder / "broker") as broker,
        RedisServer(folder / "locks") as locks,
        ExitStack() as stack,
    ):
        os.environ |= {"FLOW_BROKER": broker.url, "FLOW_LOCKS": locks.url}
        made = Fleet(broker, locks)
        for nth in range(made.module.WORKERS):
            command = [sys.executable, "-m", "celery", "-A", "benchmarks.flow_tasks", "worker"]
            command += ["--dislock", "--concurrency", str(made.module.SLOTS), "-n", f"flow{nth}@%h"]
            command += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
            command += ["--loglevel", "WARNING"]
            stack.enter_context(started(command, folder / f"worker-{nth}.log"))
        made.wait_for_workers()
        yield made


def of_fleet(folder: Path) -> list[Figure]:
    with fleet(folder) as workers:
        of = workers.module
        keys = {
            "Key(limit=2)": workers.queued(of.one_key),
            "Key(limit=2) and a tenant": workers.queued(of.two_keys),
        }
        take_turns(keys, 1)  # connections are made, scripts loaded, caches warm
        kept = take_turns(keys, KEYS_ROUNDS)
        paced = take_turns(
            {
                f"{OURS}, lock_rate": workers.paced(of.paced, parks=True),
                BY_HAND: workers.paced(of.windowed),
            },
            PACED_ROUNDS,
        )
        paced |= take_turns({AT_ONCE: workers.at_once}, PACED_ROUNDS)
        paced[CELERYS] = [workers.limited()]
    figures = []
    for variant, rounds in paced.items():
        for share in (0.5, 0.99):
            late = [percentile(one.late, share) for one in rounds]
            figures.append(Figure(PACED, f"late, p{100 * share:g} ms", variant, NETWORK, late))
        most = [max(one.most for one in rounds)]
        figures.append(Figure(PACED, "most starts in a second", variant, NETWORK, most))
        rates = [one.rate for one in rounds]
        figures.append(Figure(PACED, "starts a second", variant, NETWORK, rates))
    for name, results in kept.items():
        for nth, what in enumerate(("tasks/s", "scripts per task", "us of the server per script")):
            values = [one[nth] for one in results]
            figures.append(Figure(KEYS, what, f"{OURS}, {name}", NETWORK, values))
    return figures
