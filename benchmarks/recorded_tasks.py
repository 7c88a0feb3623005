"""The app of the benchmarks about parked tasks, and its worker, which writes down each delivery.

    python -m benchmarks.recorded_tasks <broker> <lock server> <file> [option of the worker ...]

A line of the file is a delivery that has ended; see `Delivery`.  A file, since all that is measured
is what Redis and the processes do otherwise: writing a line costs some microseconds, and no
command.  Times are monotonic ones, which are the same for all processes of the machine.
"""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import redis
from celery import Celery, Task
from celery.signals import task_postrun, task_prerun

from celery_dislock import Dislock

if TYPE_CHECKING:
    from collections.abc import Callable

QUEUE = "recorded"
COUNTDOWN = 1  # seconds until the lock by hand is tried again
WAIT_TIMEOUT = 600  # seconds: longer than any run
EXPIRE = 30  # seconds, of the lock by hand; our lock_watchdog_timeout is that by default
RELEASE = (
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"
)


class Delivery(NamedTuple):
    """
    One delivery of a task to a pool process.

    Attributes:
        key: What its lock is about.
        task_id: Of the task.
        started, ended: When Celery called what it calls before and after a task: the slot was taken
            that long.
        body_began, body_ended: When its body ran; None where it did not.
    """

    key: str
    task_id: str
    started: float
    body_began: float | None
    body_ended: float | None
    ended: float

    @property
    def waited(self) -> float:
        """Seconds in its slot before its body began; all of them where it did not run."""
        return (self.body_began or self.ended) - self.started


class Running:
    """What is known of the delivery that a process runs."""

    started = 0.0
    began: float | None = None
    ended: float | None = None


def body(seconds: float) -> None:
    """Be busy without the processor, and note when."""
    Running.began = time.monotonic()
    if seconds:
        time.sleep(seconds)
    Running.ended = time.monotonic()


def make_app(url: str, lock_url: str, results: str | None = None) -> Celery:
    """
    Make the app: one body, as it is and in several locks.

    Args:
        url: Of its broker.
        lock_url: Of its lock server.
        results: URL of its result backend.  None for those that only publish: Celery would
            subscribe to each task's result there, as no worker does that publishes a task.
    """
    app = Celery("recorded", broker=url, backend=results, set_as_current=False)
    app.conf.task_default_queue = QUEUE
    app.conf.dislock_url = lock_url
    app.dislock = Dislock(app)
    client = cache(lambda: redis.Redis.from_url(lock_url))  # first used by a pool process

    def run(key: str, seconds: float = 0.0) -> None:  # noqa: ARG001  # the lock's
        body(seconds)

    def by_hand(task: Task, key: str, seconds: float = 0.0) -> None:
        name, token = f"by-hand:{key}", uuid.uuid4().hex
        if not client().set(name, token, nx=True, ex=EXPIRE):
            raise task.retry(countdown=COUNTDOWN)
        try:
            body(seconds)
        finally:
            client().register_script(RELEASE)(keys=[name], args=[token])

    def declare(name: str, run: Callable[..., None], **options: Any) -> None:
        app.task(name=name, shared=False, **options)(run)  # not with the next app in this process

    in_slot = {"lock_on_conflict": "wait", "lock_wait_timeout": WAIT_TIMEOUT}
    declare("plain", run)
    declare("queue", run, lock_key="<key>", lock_on_conflict="queue")
    declare("wait", run, lock_key="<key>", **in_slot)
    declare("by_hand", by_hand, bind=True, max_retries=None)
    app.finalize()
    return app


def note_deliveries(path: Path) -> None:
    """Write down, from now on, each delivery that this process or one forked from it has run."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def started(**_kwargs: Any) -> None:
        Running.started, Running.began, Running.ended = time.monotonic(), None, None

    def ended(task_id: str, args: Any, **_kwargs: Any) -> None:
        times = (Running.started, Running.began, Running.ended, time.monotonic())
        os.write(file, json.dumps([args[0], task_id, *times]).encode() + b"\n")

    task_prerun.connect(started, weak=False)
    task_postrun.connect(ended, weak=False)


def work(url: str, lock_url: str, path: str, *options: str) -> None:
    """Be the worker."""
    app = make_app(url, lock_url, url)
    note_deliveries(Path(path))
    app.set_current()
    arguments = ["worker", "--dislock", "--loglevel", "WARNING", *options]
    arguments += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    app.worker_main(arguments)


if __name__ == "__main__":
    work(*sys.argv[1:])
