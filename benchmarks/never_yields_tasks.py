"""The app of the `never_yields` benchmark: bodies that keep a watchdog from running."""

from __future__ import annotations

import ctypes
import os
import time
from functools import cache

import redis
import redis_lock
from celery import Celery

from celery_dislock import Dislock

URL = os.environ["NEVER_YIELDS_REDIS"]
TIMEOUT = 3  # seconds; an integer, for python-redis-lock
LASTS = 3.0 * TIMEOUT  # seconds of a body
ENDS = "ends"  # a list of the kinds of bodies that have ended

app = Celery("never_yields_tasks", broker=URL)
app.conf.update(task_ignore_result=True, task_default_queue="never_yields")
app.conf.dislock_watchdog_timeout = TIMEOUT
dislock = Dislock(app)


def compute() -> None:
    """Compute in Python, without yielding to another greenlet."""
    until = time.monotonic() + LASTS
    while time.monotonic() < until:
        pass


def hold_the_gil() -> None:
    """Let no thread of this process run, as a call of a C library can."""
    ctypes.PyDLL(None).usleep(int(LASTS * 1e6))


BODIES = {"compute": compute, "hold_the_gil": hold_the_gil}


@app.task(lock_key="<body>")
def ours(body: str) -> None:
    """Run a body under a lock of ours."""
    run(body)


@app.task
def theirs(body: str) -> None:
    """Run a body under a lock of python-redis-lock, which renews it in a thread."""
    lock = redis_lock.Lock(lock_client(), body, expire=TIMEOUT, auto_renewal=True)
    lock.acquire()
    run(body)


def run(body: str) -> None:
    """Run the body, and say that it has ended while its lock is still there."""
    BODIES[body]()
    lock_client().rpush(ENDS, body)


@cache
def lock_client() -> redis.Redis:
    """Return this process's client, made at its first use."""
    return redis.Redis.from_url(URL)
