"""The app of the `noop_task` benchmark; one worker serves all its tasks, on equal terms."""

from __future__ import annotations

import os
import time
import uuid
from functools import cache

import redis
from celery import Celery

from celery_dislock import Dislock

URL = os.environ["NOOP_TASK_REDIS"]
MARKS = "marks"
EXPIRE = 30  # seconds
RELEASE = (
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"
)

app = Celery("noop_tasks", broker=URL)
app.conf.task_ignore_result = True
app.conf.task_default_queue = "noop"
dislock = Dislock(app)


@app.task
def unlocked(n: int) -> None:
    """Do nothing."""


@app.task(lock_key="noop:<n>")
def locked(n: int) -> None:
    """Do nothing, under a lock of ours."""


@app.task
def by_hand(n: int) -> None:
    """Do nothing, under the lock that people write into their task's body."""
    client = lock_client()
    name, token = f"noop-by-hand:{n}", uuid.uuid4().hex
    if not client.set(name, token, nx=True, ex=EXPIRE):
        return
    try:
        pass
    finally:
        client.register_script(RELEASE)(keys=[name], args=[token])


@app.task
def mark() -> None:
    """Say when this task ran: the first and the last of a round."""
    now = time.time()
    lock_client().rpush(MARKS, now)


@cache
def lock_client() -> redis.Redis:
    """Return this pool process's client, made at its first use."""
    return redis.Redis.from_url(URL)
