"""An app all of whose tasks are SingletonTasks: what Celery's canvas is tested with.

``add`` has no key of its own, so its name and all its arguments are its key; the tasks called
``add_or_...`` are locked by the key they are given, and each has another strategy.
"""

import os
import time
from functools import partial

import redis
from celery import Celery
from celery.exceptions import Ignore

from celery_dislock import Dislock, SingletonTask

URL = os.environ.get("SCENARIOS_URL", "redis://localhost:6379/0")
QUEUE = "fleet-canvas"
STRATEGIES = ("skip", "raise", "retry", "wait", "reject", "callable")
GATE_POLL = 0.02  # seconds between two looks at a gate

app = Celery("canvas", broker=URL, backend=URL, task_cls=SingletonTask)
app.task = partial(app.task, shared=False)  # other apps of a process are to know nothing of these
app.conf.update(
    broker_connection_retry_on_startup=True,
    result_chord_retry_interval=0.1,
    result_extended=True,
    task_default_queue=QUEUE,
    worker_prefetch_multiplier=1,
    dislock_wait_timeout=60,
)
dislock = Dislock(app)
notes = redis.Redis.from_url(URL)


@app.task
def add(x, y):
    return x + y


def _add(x, y, key):
    return x + y


def _hold(x, key):
    while not notes.exists(f"gate:{key}"):
        time.sleep(GATE_POLL)
    return x


def _ignore(task, conflict):
    raise Ignore


ADD, HOLD = {}, {}
for strategy in STRATEGIES:
    options = {
        "shared": False,
        "lock_key": "<key>",
        "lock_on_conflict": _ignore if strategy == "callable" else strategy,
        "acks_late": strategy == "reject",
    }
    ADD[strategy] = app.task(name=f"add_or_{strategy}", **options)(_add)
    HOLD[strategy] = app.task(name=f"hold_or_{strategy}", **options)(_hold)


@app.task
def total(numbers):
    return sum(numbers)


@app.task
def largest(numbers):
    return max(numbers)


@app.task(lock_key=False)
def note(key):
    """Note that somebody was told: as errback, and as callback."""
    notes.rpush(f"notes:{key}", "told")
