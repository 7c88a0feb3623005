"""
Let a newer task take over, and time the end of the body that runs and the newest's start.

Timed from before ``delay()``, on the monotonic clock of the whole machine, in a worker with two
slots.  Beside ``lock_on_conflict="cancel"`` the same by hand: ``revoke(id, terminate=True)``, and
``delay()``.  That kills the pool process, whose end counts as the body's, and works with prefork
alone.  By hand nothing keeps the two apart: the newest may start before the other one has ended.

Bodies sleep in steps of 10 ms: an exception that is raised in a thread waits for the end of a step.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import TYPE_CHECKING, Any

import redis
from celery import Celery

from benchmarks.locks import OURS
from benchmarks.measuring import Figure
from benchmarks.processes import started
from celery_dislock import Dislock
from celery_dislock.tasks.request import is_alive
from tests.redis_server import RedisServer

if TYPE_CHECKING:
    from pathlib import Path

TABLE = "Cancel what runs"
BY_HAND = "revoke and send"
NETWORK = "0 ms"
ROUNDS, LOST = 30, 3  # rounds, and those before them that do not count
PAUSE = (0.2, 0.8)  # seconds: renewals come at intervals
STEP = 0.01  # seconds
LIMIT = 60.0  # seconds until a round is given up
OVER = "over"  # a key: bodies end


def app_of(url: str) -> Celery:
    """Make the app; its tasks tell when they start and end."""
    app = Celery("cancelling", broker=url, set_as_current=False)
    app.conf.update(task_ignore_result=True, worker_prefetch_multiplier=1)
    Dislock(app)
    client = redis.Redis.from_url(url)

    def build(self: Any) -> None:
        tell(client, self.request.id, "start")
        try:
            while not client.exists(OVER):
                time.sleep(STEP)
        finally:
            tell(client, self.request.id, "end")

    app.task(name=OURS, lock_key="build", lock_on_conflict="cancel", bind=True, shared=False)(build)
    app.task(name=BY_HAND, bind=True, shared=False)(build)
    return app


def tell(client: redis.Redis, task_id: str, what: str) -> None:
    """Tell what happens to a task now, in which process."""
    client.rpush(f"{task_id} {what}", json.dumps([time.monotonic(), os.getpid()]))


def when(client: redis.Redis, task_id: str, what: str) -> tuple[float, int]:
    """Wait until that has happened; return when, and in which process."""
    answer: Any = client.blpop([f"{task_id} {what}"], LIMIT)
    assert answer is not None, f"a task does not {what}"
    at, pid = json.loads(answer[1])
    return at, pid


def gone(pid: int) -> float:
    """Wait until a process has ended; return when."""
    until = time.monotonic() + LIMIT
    while is_alive(pid):
        assert time.monotonic() < until, "a process does not end"
        time.sleep(STEP / 10)
    return time.monotonic()


def rounds(app: Celery, client: redis.Redis, name: str) -> list[tuple[float, float]]:
    """Return for each round the milliseconds to the old body's end and to the newest's start."""
    task, took = app.tasks[name], []
    old = task.delay().id
    for _ in range(LOST + ROUNDS):
        _, pid = when(client, old, "start")
        time.sleep(random.uniform(*PAUSE))
        sent = time.monotonic()
        if name == BY_HAND:
            app.control.revoke(old, terminate=True)
        new = task.delay().id
        ended = gone(pid) if name == BY_HAND else when(client, old, "end")[0]
        began, in_process = when(client, new, "start")
        client.rpush(f"{new} start", json.dumps([began, in_process]))
        took.append((1e3 * (ended - sent), 1e3 * (began - sent)))
        old = new
    return took[LOST:]


def measure(folder: Path) -> list[Figure]:
    figures = []
    for pool, names in (("prefork", (OURS, BY_HAND)), ("threads", (OURS,))):
        with RedisServer(folder / pool) as server, server.client(socket_timeout=None) as client:
            app = app_of(server.url)
            for name in names:
                command = [sys.executable, "-m", "benchmarks.cancelling", server.url, pool]
                with started(command, folder / f"{pool}.log"):
                    took = rounds(app, client, name)
                    client.set(OVER, 1, ex=5)
                client.flushdb()
                variant = f"{name}, {pool}"
                for nth, what in enumerate(("the body that runs has ended", "the newest starts")):
                    values = [one[nth] for one in took]
                    figures.append(Figure(TABLE, f"{what}, ms", variant, NETWORK, values))
    return figures


if __name__ == "__main__":
    worker = ["worker", "--dislock", "--concurrency", "2", "--pool", sys.argv[2]]
    app_of(sys.argv[1]).worker_main([*worker, "--loglevel", "WARNING", "--without-gossip"])
