"""
Kill the beat that sends, again and again, beside RedBeat.

Three beats of each, with the same schedule, the same time limits, and a Redis of their own.  The
one that has sent last is killed at random moments; after that, the one that has sent last is halted
for longer than its lock lasts, and goes on.  A process that has ended, by a kill or by itself, is
started again after a second, as systemd and Kubernetes do.

- Ended by itself: processes that were not killed.
- Sent twice: messages that come sooner than the schedule says, or again under the same task id.
- Missing: ticks without a message.  Of those that became due while no beat sent, one is sent.
- Silence: from the time when the next message was due until it was sent.

This module is also the app of those beats; the environment has its settings then.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from contextlib import ExitStack, suppress
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from celery import Celery
from celery.signals import before_task_publish

from benchmarks.environments import ROOT
from benchmarks.locks import OURS
from benchmarks.measuring import Figure
from benchmarks.processes import started
from tests.redis_server import RedisServer

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Sequence
    from pathlib import Path

KILLED, HALTED = "50 kills of the beat that sends", "10 halts of the beat that sends"
KILLS, HALTS = 50, 10
BEATS = 3
EVERY = 1.0  # seconds between two ticks
TIMEOUT = 5  # seconds until the lock of a killed beat ends
LOOP = 1  # seconds between two looks at the lock; RedBeat's timeout is five times this by default
HALT = 8.0  # seconds
BETWEEN = (1.0, 4.0)  # seconds from the first message after a kill to the next kill
RESTARTED = 1.0  # seconds
LIMIT = 120.0  # seconds until something is sent again
LOOK = 0.02  # seconds
SAME = 0.1  # of a tick: more than the clock of a message is off
SEED = 27
CONF = "BENCH_BEATS"
QUEUE = "ticks"  # that nobody reads

VARIANTS: dict[str, tuple[list[str], dict[str, Any]]] = {
    OURS: (["--dislock"], {"dislock_beat_timeout": TIMEOUT}),
    "RedBeat": (["-S", "redbeat.RedBeatScheduler"], {"redbeat_lock_timeout": TIMEOUT}),
}

app = Celery("beats", set_as_current=False)
if CONF in os.environ:
    app.conf.update(json.loads(os.environ[CONF]))

    @before_task_publish.connect
    def sign(headers: dict[str, Any], **_: Any) -> None:
        """Say who sends a message, and when."""
        headers["sent"] = [time.monotonic(), os.getpid()]


class Sent(NamedTuple):
    """A message: when and by which process it was sent, and its task's id."""

    at: float
    by: int
    id: str


class Beats:
    """
    Three beats, and who starts them again.

    Args:
        variant: Of `VARIANTS`.
        folder: For what they write.
        stack: Ends them.
    """

    def __init__(self, variant: str, folder: Path, stack: ExitStack) -> None:
        server = stack.enter_context(RedisServer(folder / "redis"))
        self._queue = stack.enter_context(server.client())
        command, conf = VARIANTS[variant]
        self._command, self._folder, self._stack = command, folder, stack
        self._conf = conf | {
            "broker_url": server.url,
            "dislock_url": server.url,
            "redbeat_redis_url": server.url,
            "beat_schedule": {"tick": {"task": "tick", "schedule": EVERY}},
            "beat_max_loop_interval": LOOP,
            "result_expires": None,
            "task_default_queue": QUEUE,
        }
        self._running = [self._start(at) for at in range(BEATS)]
        self._killed: set[int] = set()
        self.ended_by_itself = 0
        self._over = threading.Event()
        supervisor = threading.Thread(target=self._supervise)
        supervisor.start()
        stack.callback(supervisor.join)
        stack.callback(self._over.set)

    def sent(self) -> list[Sent]:
        """Return all messages, in the order in which they were sent."""
        messages = [json.loads(one)["headers"] for one in self._queue.lrange(QUEUE, 0, -1)]
        return sorted(Sent(at, by, one["id"]) for one in messages for at, by in [one["sent"]])

    def wait(self) -> int:
        """Wait until another message is sent; returns the process that has sent it."""
        before, until = self._queue.llen(QUEUE), time.monotonic() + LIMIT
        while self._queue.llen(QUEUE) == before:
            assert time.monotonic() < until, "nothing is sent any more"
            time.sleep(LOOK)
        return self.sent()[-1].by

    def kill(self, leader: int) -> None:
        """Kill one, for good; it may have ended by itself just before."""
        self._killed.add(leader)
        with suppress(ProcessLookupError):
            os.kill(leader, signal.SIGKILL)

    def halt(self, leader: int) -> None:
        """Stop one for a while, so that its lock ends."""
        os.kill(leader, signal.SIGSTOP)
        time.sleep(HALT)
        os.kill(leader, signal.SIGCONT)

    def _start(self, at: int) -> subprocess.Popen[bytes]:
        name = self._folder / f"{at}-{time.monotonic():.3f}"
        command = [sys.executable, "-m", "celery", "-A", __name__, "beat", *self._command]
        command += ["--schedule", str(self._folder / f"schedule-{at}"), "--loglevel", "INFO"]
        env: dict[str, Any] = {CONF: json.dumps(self._conf), "PYTHONPATH": str(ROOT)}
        log = name.with_suffix(".log")
        return self._stack.enter_context(started(command, log, **env))

    def _supervise(self) -> None:
        while not self._over.wait(LOOK):
            for at, process in enumerate(self._running):
                if process.poll() is not None:
                    self.ended_by_itself += process.pid not in self._killed
                    self._over.wait(RESTARTED)
                    self._running[at] = self._start(at)


def measure(folder: Path) -> list[Figure]:
    """Let both have their kills at the same time: they wait nearly always."""
    found: dict[str, list[Figure]] = {}

    def of(variant: str) -> None:
        with ExitStack() as stack:
            beats = Beats(variant, folder / variant, stack)
            found[variant] = [
                *disturbed(beats, variant, KILLED, KILLS, beats.kill),
                *disturbed(beats, variant, HALTED, HALTS, beats.halt),
            ]

    threads = [threading.Thread(target=of, args=(variant,)) for variant in VARIANTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [figure for variant in VARIANTS for figure in found[variant]]


def disturbed(
    beats: Beats, variant: str, table: str, times: int, disturb: Callable[[int], None]
) -> list[Figure]:
    """Disturb the beat that sends, again and again, and count what comes of it."""
    chance = random.Random(SEED)
    beats.wait()
    ended, since = beats.ended_by_itself, len(beats.sent())
    at = []
    for _ in range(times):
        time.sleep(chance.uniform(*BETWEEN))
        at.append(time.monotonic())
        disturb(beats.sent()[-1].by)
        beats.wait()
    beats.wait()
    counts = count(beats.sent()[since - 1 :], at)
    counts["ended by itself"] = [beats.ended_by_itself - ended]
    return [Figure(table, what, variant, "0 ms", values) for what, values in counts.items()]


def count(sent: Sequence[Sent], disturbed_at: Sequence[float]) -> dict[str, Sequence[float]]:
    """Return the figures of some messages."""
    gaps = [(after.at - one.at) / EVERY for one, after in pairwise(sent)]
    silences = []
    for at in disturbed_at:
        before = max(one.at for one in sent if one.at <= at)
        after = min(one.at for one in sent if one.at > at)
        silences.append(max(0.0, after - before - EVERY))
    return {
        "sent twice": [sum(gap < 1 - SAME for gap in gaps)],
        "of these under one id": [len(sent) - len({one.id for one in sent})],
        "missing": [sum(max(0, int(gap + SAME) - 1) for gap in gaps)],
        "silence, s: median": [median(silences)],
        "longest": [max(silences)],
    }
