"""A unique task, in workers that are killed.

UNIQUE_LOCKS is the lock server, UNIQUE_BROKER the broker.  What runs is pushed to the list "ran" on
the lock server, and waits there until there is a key "gate".
"""

import os
import time

import redis
from celery import Celery

from celery_dislock import Dislock, SingletonTask
from tests.pace import LEASE

UNIQUE_FOR = 30.0  # seconds
TIMEOUT = LEASE  # lock_watchdog_timeout
LOCKS = os.environ.get("UNIQUE_LOCKS", "")

app = Celery("unique", broker=os.environ.get("UNIQUE_BROKER"))
app.conf.update(
    dislock_url=LOCKS,
    broker_connection_retry_on_startup=True,
    task_acks_late=True,
    worker_prefetch_multiplier=200,
)
dislock = Dislock(app)


@app.task(
    base=SingletonTask,
    shared=False,
    name="edit",
    lock_key="edit:<doc>",
    lock_unique_until="end",
    lock_unique_for=UNIQUE_FOR,
    lock_watchdog_timeout=TIMEOUT,
    lock_on_conflict="retry",
    ignore_result=True,
)
def edit(doc):
    """Wait for the gate."""
    with redis.Redis.from_url(LOCKS) as client:
        client.rpush("ran", f"edit:{doc}")
        while not client.exists("gate"):
            time.sleep(0.02)
