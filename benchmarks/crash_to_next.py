"""
Kill the process that holds a lock, and time the start of the next task of its key, beside peers.

A task of a prefork worker holds the lock of its key when its pool process gets SIGKILL.  Timed
from before the kill to the first line of the next body of that key; both clocks are the monotonic
one of the whole machine.  To reach: under 1 s each time, with leases of 30 s.

- Waiting: the next task is in the other pool process and waits in line (``lock_on_conflict=
  "wait"``), so all that is measured is how soon the death is noticed and the lock handed on.
- Sent again: the next task is sent every 20 ms until one of them starts.  That is the only way
  with celery-once and celery-singleton, which refuse at the sender; ours, with "skip", refuses in
  the worker, and takes the same way here to be beside them.

The peers' locks expire after 30 s too, counted from the sending of the task that was killed.  Each
has an environment of its own, made by pip at the first run and kept in .venvs; with the newest
Celery, as its users would install it.  A peer that cannot be installed, or does not lock there,
says so in its row.

Each round has a key of its own.  Before the kill, the next task is sent once already, and must not
start for a random while: so the lock is shown to be in its way.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import redis

from benchmarks.environments import REQUIREMENTS, ROOT, NotInstalled, environment
from benchmarks.processes import STOPPING, started
from benchmarks.report import Row
from tests.redis_server import RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from celery import Celery, Task

TARGET = 1.0  # seconds
EXPIRE = 30  # seconds; our lock_watchdog_timeout is that by default
ROUNDS = 12
PEER_ROUNDS = 2  # of about half a minute each
ROUND_LIMIT = 60.0  # seconds until a round is given up
RESEND_EVERY = 0.02  # seconds
BEFORE_KILL = (0.3, 1.3)  # seconds: the worker looks after its pool at intervals
STARTING = 30.0  # seconds that a worker is given to start, and a task to run
HELD_BY_BODY = 300.0  # seconds: longer than a round
STARTS = "starts"  # a list: the round, the monotonic time and the process of each start


class Way(NamedTuple):
    """
    One way to get the next task in.

    Attributes:
        name: What the table calls it.
        rounds: How many kills.
    """

    name: str
    rounds: int


class Measured(NamedTuple):
    """What came out of the rounds of one way."""

    celery: str  # version
    seconds: list[float]


WAYS = {
    "waiting": Way("ours", ROUNDS),
    "skipping": Way("ours", ROUNDS),
    "celery_once": Way("celery-once", PEER_ROUNDS),
    "celery_singleton": Way("celery-singleton", PEER_ROUNDS),
}
PEERS = [way for way, kind in WAYS.items() if kind.name in REQUIREMENTS]


def run(folder: Path) -> list[Row]:
    took: dict[str, Measured] = {}
    for way in WAYS:
        if way not in PEERS:
            with rounds(way, sys.executable, folder / way) as finish:
                took[way] = finish()
    failures: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        # At the same time, each on a server of its own: all they do is wait.
        running = {}
        for peer in PEERS:
            try:
                python = environment(WAYS[peer].name)
                running[peer] = stack.enter_context(rounds(peer, python, folder / peer))
            except NotInstalled as exc:
                failures[peer] = str(exc)
        for peer, finish in running.items():
            try:
                took[peer] = finish()
            except RoundsFailed as exc:
                failures[peer] = str(exc).splitlines()[-1]
    return [
        ours_row("SIGKILL to next start, s", took["waiting"].seconds),
        ours_row("  the same, sent again", took["skipping"].seconds),
        *(
            peer_row(peer, took["skipping"].seconds, took.get(peer), failures.get(peer))
            for peer in PEERS
        ),
    ]


def ours_row(measured: str, ours: Sequence[float]) -> Row:
    return Row(measured, shown(ours), target=f"< {TARGET:g}", reached=max(ours) < TARGET)


def peer_row(peer: str, ours: Sequence[float], theirs: Measured | None, failure: str | None) -> Row:
    name = WAYS[peer].name
    if theirs is None:
        return Row("  beside the peer's", shown(ours), name, f"no figure: {failure}")
    # Not round by round: ours are more rounds, and these differ by far more than any noise.
    factors = [their / median(ours) for their in theirs.seconds]
    name = f"{name}, Celery {theirs.celery}"
    return Row("  times sooner than the peer's", shown(ours), name, shown(theirs.seconds), factors)


def shown(took: Sequence[float]) -> str:
    """Show the median and the longest."""
    longest = f">= {max(took):.0f}" if max(took) >= ROUND_LIMIT else f"{max(took):.2f}"
    return f"{median(took):.2f}, max {longest}"


class RoundsFailed(RuntimeError):  # noqa: N818  # as NotInstalled
    """A process that was to measure has ended with an error; the last line says which."""


@contextlib.contextmanager
def rounds(way: str, python: str, folder: Path) -> Iterator[Callable[[], Measured]]:
    """
    Measure in a process of that Python, on a server of its own; both are gone in the end.

    Yields:
        What waits for the figures and returns them, or raises RoundsFailed.
    """
    with RedisServer(folder) as server:
        command = [python, "-m", "benchmarks.crash_to_next", way, server.url]
        log = folder / "worker.log"
        with started(command, log, patience=2 * STOPPING, asked=True) as process:

            def finish() -> Measured:
                figures, _ = process.communicate()
                if process.returncode:
                    raise RoundsFailed(log.read_text(errors="replace").strip())
                return Measured(*json.loads(figures))

            yield finish


# From here on: what runs in the environment of a way, and imports no more of us than it has to.


def app_of(way: str, url: str) -> tuple[Celery, Task]:
    """Make the app of a way, and its task."""
    from celery import Celery  # noqa: PLC0415  # the peer's own

    app = Celery("crash", broker=url)
    app.conf.task_default_queue = "crash"
    app.conf.task_ignore_result = True
    options: dict[str, Any]
    if way == "celery_once":
        from celery_once import QueueOnce  # noqa: PLC0415  # in one environment only

        settings = {"url": url, "default_timeout": EXPIRE}
        app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": settings}
        options = {"base": QueueOnce, "once": {"keys": ["corp_id"], "graceful": True}}
    elif way == "celery_singleton":
        from celery_singleton import Singleton  # noqa: PLC0415  # as above

        app.conf.singleton_backend_url = url
        options = {"base": Singleton, "unique_on": ["corp_id"], "lock_expiry": EXPIRE}
    else:
        from celery_dislock import Dislock  # noqa: PLC0415  # not in a peer's environment

        Dislock(app)
        strategy = "wait" if way == "waiting" else "skip"
        options = {"lock_key": "export:<corp_id>", "lock_on_conflict": strategy}

    def export(corp_id: int, *, stay: bool) -> None:
        now = time.monotonic()
        redis.Redis.from_url(url).rpush(STARTS, json.dumps([corp_id, now, os.getpid()]))
        if stay:
            time.sleep(HELD_BY_BODY)

    return app, app.task(name="crash.export", **options)(export)


class Round:
    """One kill, and the wait for the next task."""

    def __init__(self, client: redis.Redis, task: Task, number: int) -> None:
        self._client = client
        self._task = task
        self._number = number

    def seconds(self, *, resend: bool) -> float:
        """Return what passes between the kill and the next start; `ROUND_LIMIT` at most."""
        self._send(stay=True)
        holder = self._next_start(within=STARTING)
        if holder is None:
            raise RuntimeError("the worker does not run the task")
        self._send(stay=False)
        if self._next_start(within=random.uniform(*BEFORE_KILL)):
            raise RuntimeError("it does not lock: two tasks of one key run at a time")
        killed = time.monotonic()
        os.kill(holder[1], signal.SIGKILL)
        following = None
        while following is None and (left := killed + ROUND_LIMIT - time.monotonic()) > 0:
            if resend:
                self._send(stay=False)
            following = self._next_start(within=RESEND_EVERY if resend else left)
        return following[0] - killed if following else ROUND_LIMIT

    def _send(self, *, stay: bool) -> None:
        self._task.apply_async(kwargs={"corp_id": self._number, "stay": stay})

    def _next_start(self, within: float) -> tuple[float, int] | None:
        """Wait for the next start of this round: its time and its process."""
        deadline = time.monotonic() + within
        while (left := deadline - time.monotonic()) > 0:
            answer = self._client.blpop([STARTS], timeout=left)
            if answer is not None:
                number, when, pid = json.loads(answer[1])
                if number == self._number:  # else one more of a round that is over
                    return when, pid
        return None


@contextlib.contextmanager
def worker(way: str, url: str) -> Iterator[None]:
    """Run the worker in a process group of its own; none of it is left."""
    command = [sys.executable, "-m", "benchmarks.crash_to_next", way, url, "worker"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True
    )
    try:
        yield
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOPPING)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def work(way: str, url: str) -> None:
    """Be the worker: the processes of the pool are two, the one that dies and the other."""
    app, _ = app_of(way, url)
    arguments = ["worker", "--pool", "prefork", "--concurrency", "2", "--loglevel", "ERROR"]
    arguments += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    app.worker_main([*arguments, *([] if way in PEERS else ["--dislock"])])


def measure(way: str, url: str) -> None:
    """Print the seconds of each round."""
    signal.signal(signal.SIGTERM, lambda signum, _frame: sys.exit(128 + signum))
    _, task = app_of(way, url)
    with worker(way, url), redis.Redis.from_url(url) as client:
        took = [
            Round(client, task, number).seconds(resend=way != "waiting")
            for number in range(WAYS[way].rounds)
        ]
    print(json.dumps(Measured(version("celery"), took)))


if __name__ == "__main__":
    (work if sys.argv[3:] else measure)(*sys.argv[1:3])
