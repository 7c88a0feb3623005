"""The app of the section `flow`: 200 starts a second, and lines of one key and of two."""

from __future__ import annotations

import os
import time
from functools import cache
from typing import Any

import redis
from celery import Celery

from benchmarks.noop_tasks import starts_now
from celery_dislock import Dislock, Key, SingletonTask

BROKER, LOCKS = os.environ["FLOW_BROKER"], os.environ["FLOW_LOCKS"]
QUEUE = "flow"
STARTS = "starts"  # list: Redis TIME in microseconds of each start of a body
MOST = 200  # starts in a second
WORKERS, SLOTS = 4, 2

app = Celery("flow_tasks", broker=BROKER)
app.conf.update(task_default_queue=QUEUE, task_ignore_result=True, dislock_url=LOCKS)
dislock = Dislock(app)


@cache
def client(url: str) -> redis.Redis:
    """Return this pool process's client, made at its first use."""
    return redis.Redis.from_url(url)


def note(started: int) -> None:
    """Be the body: say when it started."""
    client(BROKER).rpush(STARTS, started)


@app.task(
    bind=True,
    base=SingletonTask,
    lock_key="paced",
    lock_rate=f"{MOST}/s",
    lock_on_conflict="queue",
)
def paced(self: Any, _n: int) -> None:
    """Start as our rate says; a lease's token is when it was counted."""
    note(self.lease.token)


@app.task(bind=True, max_retries=None)
def windowed(self: Any, _n: int) -> None:
    """Start as the rate by hand says."""
    note(starts_now(client(LOCKS), self, "windowed", MOST))


@app.task(rate_limit=f"{MOST // WORKERS}/s")
def limited(_n: int) -> None:
    """Start as Celery's rate says, which is a worker's."""
    note(time.time_ns() // 1000)


@app.task
def plain(_n: int) -> None:
    """Start without a lock."""
    note(time.time_ns() // 1000)


@app.task(base=SingletonTask, lock_key=Key("one", limit=2), lock_on_conflict="queue")
def one_key(_n: int) -> None:
    """Run, two at a time."""
    note(time.time_ns() // 1000)


@app.task(
    base=SingletonTask,
    lock_key=[Key("two", limit=2), "tenant:<_n>"],
    lock_on_conflict="queue",
)
def two_keys(_n: int) -> None:
    """Run, two at a time, and one of each tenant."""
    note(time.time_ns() // 1000)
