"""The app of the `bursts` benchmark: two ways to make few runs of many edits."""

from __future__ import annotations

import os
import time
from functools import cache

import redis
from celery import Celery

from celery_dislock import Dislock, SingletonTask

URL = os.environ["BURSTS_REDIS"]
QUEUE = "edits"
RUNS = "runs"  # list: document and edition of each start of a body
BODY = 0.05  # seconds

app = Celery("bursts_tasks", broker=URL)
app.conf.update(task_default_queue=QUEUE, dislock_url=URL)
dislock = Dislock(app)


@app.task(
    base=SingletonTask,
    lock_key="debounce:<doc>",
    lock_unique_until="start",
    lock_on_duplicate="replace",
    lock_replace_for=60,
)
def debounce(doc: str, edition: int) -> None:
    """Run the newest, once no other has come for the time of the countdown."""
    index(doc, edition)


@app.task(
    base=SingletonTask,
    lock_key="coalesce:<doc>",
    lock_on_conflict="queue",
    lock_queue_limit=1,
    lock_queue_overflow="replace",
)
def coalesce(doc: str, edition: int) -> None:
    """Run, and of those that come meanwhile, run one more."""
    index(doc, edition)


def index(doc: str, edition: int) -> None:
    """Be the body: say which edition runs."""
    notes().rpush(RUNS, f"{doc} {edition}")
    time.sleep(BODY)


@cache
def notes() -> redis.Redis:
    """Return this pool process's client, made at its first use."""
    return redis.Redis.from_url(URL)
