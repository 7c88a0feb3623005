"""
Send 10,000 messages of 100 keys from four processes, while a worker is killed each second.

Three prefork workers with two processes each run the tasks.  Each second, one of them and its pool
get SIGKILL, and it is started again.  The tasks are acked late and redelivered when their worker
dies; two of one key run one after the other (``lock_on_conflict="queue"``); and a reservation ends
when its task starts, so each ``delay()``, sent or refused, must be followed by a start of its key.
To reach: no key without a start after its last ``delay()``, and no reservation left
``lock_unique_for`` (30 s) after the last task.

The broker is a RabbitMQ: a Redis broker itself loses messages that a killed worker has just taken.
If there is no RabbitMQ here it is Redis, the row says so, and nothing has to be reached.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report import Row
from example_project.redis_server import RedisServer
from tests.acceptance.rabbitmq import find_rabbitmq, running

if TYPE_CHECKING:
    from collections.abc import Iterator

    import redis
    from typing_extensions import Self

SENDERS = 4
SENDS = 10_000  # of all senders
KEYS = 100
WORKERS = 3
PROCESSES = 2  # of each pool
KILL_EVERY = 1.0  # seconds
STARTING = 30.0  # seconds that the workers are given to start
SENDING = 300.0  # seconds that the senders are given
QUIET = 10.0  # seconds without a start, after which all tasks have run; a sweep comes sooner
DRAINING = 180.0  # seconds until that
STOPPING = 15.0  # seconds that a worker is given to stop
ROOT = Path(__file__).parents[1]


def run(folder: Path) -> list[Row]:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(RedisServer(folder / "redis"))
        client = stack.enter_context(server.client())
        broker, name = server.url, "Redis"
        if programs := find_rabbitmq():
            broker = stack.enter_context(running(programs, folder / "rabbit")).url
            name = "RabbitMQ"
        os.environ["ENQUEUE_REDIS"], os.environ["ENQUEUE_BROKER"] = server.url, broker
        from benchmarks import enqueue_tasks as tasks  # noqa: PLC0415  # reads the addresses

        workers = [stack.enter_context(Worker(folder, number)) for number in range(WORKERS)]
        wait_until_started(client, tasks)
        kills = send_and_kill(folder, workers)
        wait_until_quiet(client, tasks.RUNS)
        time.sleep(tasks.UNIQUE_FOR)
        left = [key for key in client.scan_iter(f"{tasks.PREFIX}:*") if reserves(key)]
        sends = [json.loads(note) for note in client.lrange(tasks.SENDS, 0, -1)]
        runs = [json.loads(note) for note in client.lrange(tasks.RUNS, 0, -1)]
    return rows(sends, runs, left, kills, name)


def rows(
    sends: list[Any], runs: list[Any], left: list[bytes], kills: int, broker: str
) -> list[Row]:
    assert len(sends) == SENDS, f"{len(sends)} sends"
    last_send: dict[int, float] = {}
    for doc, _, _, before, _ in sends:
        last_send[doc] = max(before, last_send.get(doc, before))
    last_start: dict[int, float] = {}
    for doc, _, began in runs:
        last_start[doc] = max(began, last_start.get(doc, began))
    missing = [doc for doc, sent in last_send.items() if last_start.get(doc, 0.0) < sent]
    published = {task_id for _, task_id, duplicate, _, _ in sends if not duplicate}
    started = {task_id for _, task_id, _ in runs}
    strict = broker != "Redis"
    return [
        Row(
            "keys without a run after their last send",
            f"{len(missing)} of {len(last_send)}",
            f"{broker}, {kills} kills",
            target="0" if strict else "",
            reached=not missing if strict else None,
        ),
        Row(
            "reservations left after lock_unique_for",
            f"{len(left)}",
            target="0",
            reached=not left,
        ),
        Row("  messages sent, the rest was refused", f"{len(published):,}", "sends", f"{SENDS:,}"),
        Row("  of them never started", f"{len(published - started):,}"),
        Row("  starts, more than once after a kill", f"{len(runs):,}"),
    ]


def reserves(key: bytes) -> bool:
    return key.endswith(b":unique")


class Worker:
    """A worker with its pool, in a process group of its own; none of it is left in the end."""

    def __init__(self, folder: Path, number: int) -> None:
        self._name = f"w{number}"
        self._log = folder / f"{self._name}.log"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOPPING)
        self.kill()

    def start(self) -> None:
        """Start it; does not wait until it takes tasks."""
        command = [sys.executable, "-m", "celery", "-A", "benchmarks.enqueue_tasks", "worker"]
        command += ["--dislock", "--pool", "prefork", "--concurrency", str(PROCESSES)]
        command += ["--hostname", f"{self._name}@here", "--loglevel", "WARNING"]
        command += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self) -> None:
        """End it and its pool, as a power cut does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def wait_until_started(client: redis.Redis, tasks: Any) -> None:
    """Wait until a task has run, and forget it."""
    tasks.edit.delay(-1)
    deadline = time.monotonic() + STARTING
    while not client.llen(tasks.RUNS):
        assert time.monotonic() < deadline, "the workers do not start"
        time.sleep(0.1)
    client.delete(tasks.RUNS)


def send_and_kill(folder: Path, workers: list[Worker]) -> int:
    """Let the senders send, and kill a worker each second meanwhile; return how many."""
    with senders(folder) as processes:
        kills, deadline = 0, time.monotonic() + SENDING
        for worker in cycle(workers):
            time.sleep(KILL_EVERY)
            if all(process.poll() is not None for process in processes):
                break
            assert time.monotonic() < deadline, "the senders do not end"
            worker.kill()
            worker.start()
            kills += 1
        assert not any(process.returncode for process in processes), "a sender has failed"
    return kills


@contextlib.contextmanager
def senders(folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run the senders; none is left in the end."""
    processes = []
    try:
        for number in range(SENDERS):
            command = [sys.executable, "-m", "benchmarks.enqueue_tasks"]
            command += map(str, (number, SENDS // SENDERS, KEYS))
            with (folder / f"sender{number}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                    )
                )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def wait_until_quiet(client: redis.Redis, runs: str) -> None:
    """Wait until no task has started for a while."""
    deadline = time.monotonic() + DRAINING
    seen, since = client.llen(runs), time.monotonic()
    while time.monotonic() - since < QUIET:
        assert time.monotonic() < deadline, "the tasks do not come to an end"
        time.sleep(0.2)
        now = client.llen(runs)
        if now != seen:
            seen, since = now, time.monotonic()
