"""
Run a task that does nothing, with and without a lock, in prefork workers with a Redis broker.

With nothing in the body, the cost is Celery's own and the lock's.  Beside ours: the lock that
people write by hand in the body (SET NX and a release script), and the peers, each in an
environment of its own.  Each task has a key of its own, so no lock is ever in the way.

- Tasks per second: each message is sent once, before anything is measured.  A round puts a copy of
  the messages into the worker's queue, in one command, with a task before and after them that notes
  the time; so neither sending nor a start of the worker is in the figure.  All workers are there
  during the whole run, and wait for their turn.
- Commands: all that clients send to Redis for one task, its sending included, since the peers take
  their lock then.  Counted with MONITOR, as the difference of a long run and a short one.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from benchmarks.delay import delayed
from benchmarks.environments import ROOT, environment
from benchmarks.measuring import NETWORKS, Figure
from benchmarks.noop_tasks import MARKS
from benchmarks.processes import started
from benchmarks.report import take_turns
from tests.redis_server import RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import redis

PEERS = ("celery-once", "celery-singleton")
TABLE = "A task that does nothing"
FLOOR, OURS = "plain Celery", "celery-dislock"
VARIANTS = (FLOOR, OURS, "by-hand", *PEERS)
TASKS = 400  # in a round
ROUNDS = 9
COUNTED = (50, 250)  # tasks of the short run and of the long one
LIMIT = 120.0  # seconds until a round counts as failed


def command(variant: str, url: str, *what: str) -> list[str]:
    python = environment(variant) if variant in PEERS else sys.executable
    return [python, "-m", "benchmarks.noop_tasks", variant, url, *what]


@contextmanager
def worker(variant: str, url: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run the worker of a variant; it is stopped in the end."""
    with started(command(variant, url, "worker"), folder / f"{variant}.log") as process:
        yield process


def send(variant: str, url: str, number: int) -> None:
    """Send so many tasks, and a mark before and after them, in a process of its own."""
    subprocess.run(command(variant, url, "send", str(number)), cwd=ROOT, check=True)


def took(client: redis.Redis) -> float:
    """Wait for both marks; return the seconds between them."""
    marks = []
    for _ in range(2):
        answer = client.blpop([MARKS], timeout=LIMIT)
        assert answer is not None, "a round does not end"
        marks.append(float(answer[1]))
    return abs(marks[1] - marks[0])


def measure(folder: Path, network: str) -> list[Figure]:
    with ExitStack() as stack:
        server = stack.enter_context(RedisServer(folder))
        client = stack.enter_context(server.client(socket_timeout=None))
        messages = {}
        for variant in VARIANTS:
            send(variant, server.url, TASKS)
            messages[variant] = client.lrange(variant, 0, -1)[::-1]
            client.delete(variant)
        url = stack.enter_context(delayed(server.url, NETWORKS[network]))
        for variant in VARIANTS:
            stack.enter_context(worker(variant, url, folder))
        rounds = {name: rate(client, name, messages[name]) for name in VARIANTS}
        take_turns(rounds, 2)  # connections are made, scripts loaded, caches warm
        figures = [
            Figure(TABLE, "tasks/s", variant, network, values)
            for variant, values in take_turns(rounds, ROUNDS).items()
        ]
        if not NETWORKS[network]:  # no network changes what is sent
            figures += [
                Figure(
                    TABLE,
                    "Redis commands per task",
                    variant,
                    network,
                    [commands_per_task(client, variant, url)],
                )
                for variant in VARIANTS
            ]
        left = [*client.scan_iter("dislock:*"), *client.scan_iter("by-hand:*")]
    assert not left, f"{len(left)} locks are left, such as {left[0]!r}"
    return figures


def rate(client: redis.Redis, variant: str, messages: list[bytes]) -> Callable[[], float]:
    """Make what runs one round of a variant and returns its tasks per second."""

    def measure() -> float:
        client.lpush(variant, *messages)  # they are taken from the right
        return TASKS / took(client)

    return measure


def commands_per_task(client: redis.Redis, variant: str, url: str) -> float:
    """Count what clients send for a task, from its sending until it is acknowledged."""
    counted = []
    for number in COUNTED:
        with client.monitor() as monitor:
            client.echo("begin")
            send(variant, url, number)
            took(client)
            client.echo("end")
            sent = 0
            while not monitor.next_command()["command"].startswith("ECHO"):
                pass
            while not (seen := monitor.next_command())["command"].startswith("ECHO"):
                # The idle workers wait for messages, and ask again each second.
                idle = (
                    seen["command"].startswith("BRPOP")
                    and f"BRPOP {variant} " not in seen["command"]
                )
                sent += seen["client_type"] != "lua" and not idle
        counted.append(sent)
    return (counted[1] - counted[0]) / (COUNTED[1] - COUNTED[0])
