"""The app of the `metrics` benchmark; which settings a worker has comes from its environment."""

from __future__ import annotations

import os
import time
from functools import cache

import redis
from celery import Celery

from celery_dislock import Dislock

URL = os.environ["METRICS_BENCH_REDIS"]
QUEUE = os.environ.get("METRICS_BENCH_QUEUE", "plain")
MARKS = "marks"

app = Celery("metrics_tasks", broker=URL)
app.conf.task_ignore_result = True
app.conf.task_default_queue = QUEUE
app.conf.dislock_metrics = "metrics" in QUEUE
dislock = Dislock(app)


@app.task(lock_key="noop:<n>")
def locked(n: int) -> None:
    """Do nothing, under a lock of ours."""


@app.task
def mark() -> None:
    """Say when this task ran: the first and the last of a round."""
    now = time.time()
    client().rpush(MARKS, now)


@cache
def client() -> redis.Redis:
    """Return this pool process's client, made at its first use."""
    return redis.Redis.from_url(URL)
