"""An app whose workers count: each body notes in Redis who ran it, and when it began.

METRICS_APP_URL is its Redis; METRICS_APP_PREFIX sets its locks apart from those of other tests.
"""

import json
import os
import time
from functools import partial

import redis
from celery import Celery

from celery_dislock import Dislock, SingletonTask

URL = os.environ.get("METRICS_APP_URL", "redis://localhost:6379/0")
PREFIX = os.environ.get("METRICS_APP_PREFIX", "metrics")

GATE_POLL = 0.02  # seconds between two looks at a gate

app = Celery("metrics", broker=URL, backend=URL)
app.task = partial(app.task, shared=False)  # other apps of a process are to know nothing of these
app.conf.update(
    broker_connection_retry_on_startup=True,
    broker_transport_options={"visibility_timeout": 3600},
    dislock_metrics=True,
    dislock_prefix=PREFIX,
    dislock_watchdog_timeout=60,
    task_default_queue=PREFIX,
    worker_prefetch_multiplier=1,
)
dislock = Dislock(app)
reports = redis.Redis.from_url(URL)


def ran_in(prefix):
    """Name of the list of what has run."""
    return f"ran:{prefix}"


def gate_of(prefix):
    """Name of the gate that lets held locks go."""
    return f"gate:{prefix}"


def note(task):
    """Note that a body runs, under its lock."""
    about = {"worker": task.request.hostname, "pid": os.getpid(), "at": time.time()}
    reports.rpush(ran_in(PREFIX), json.dumps(about))


@app.task(base=SingletonTask, lock_key="step:<n>", bind=True)
def step(self, n):
    """Do a little."""
    note(self)


@app.task(base=SingletonTask, lock_key="<key>", bind=True)
def hold(self, key):
    """Hold a lock until the gate is open."""
    note(self)
    while not reports.exists(gate_of(PREFIX)):
        time.sleep(GATE_POLL)


@app.task(base=SingletonTask, lock_key="<key>", lock_on_conflict="queue", bind=True)
def in_turn(self, key):
    """Run after those that came before."""
    note(self)
