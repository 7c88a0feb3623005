"""The app of the `enqueue_under_kills` benchmark, and one of its senders."""

from __future__ import annotations

import json
import os
import random
import sys
import time

import redis
from celery import Celery

from celery_dislock import Dislock, SingletonTask

LOCKS = os.environ["ENQUEUE_REDIS"]
BROKER = os.environ["ENQUEUE_BROKER"]
QUEUE = "edits"
RUNS = "runs"  # list: key, task id and monotonic time of each start of a body
SENDS = "sends"  # list: key, task id, whether it was refused, and the times before and after
PREFIX = "dislock"
UNIQUE_FOR = 30.0  # seconds
LEASE = 3.0  # seconds; leases of a killed worker end by then, if not before
BODY = 0.01  # seconds
PAUSE = 0.02  # seconds between two sends of a sender, at most

app = Celery("enqueue_tasks", broker=BROKER)
app.conf.task_ignore_result = True
app.conf.task_default_queue = QUEUE
app.conf.task_acks_late = True
app.conf.task_reject_on_worker_lost = True
app.conf.worker_prefetch_multiplier = 1
app.conf.worker_cancel_long_running_tasks_on_connection_loss = False
app.conf.dislock_url = LOCKS
if BROKER.startswith("amqp"):
    app.conf.broker_transport_options = {"confirm_publish": True}
else:
    # So that redelivery takes seconds, as on RabbitMQ.
    app.conf.broker_transport_options = {
        "visibility_timeout": 5,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    }
dislock = Dislock(app)
notes = redis.Redis.from_url(LOCKS)


@app.task(
    name="edit",  # a sender is __main__
    bind=True,
    base=SingletonTask,
    lock_key="edit:<doc>",
    lock_on_conflict="queue",
    lock_watchdog_timeout=LEASE,
    lock_unique_until="start",
    lock_unique_for=UNIQUE_FOR,
)
def edit(self: SingletonTask, doc: int) -> None:
    """Say when it began."""
    notes.rpush(RUNS, json.dumps([doc, self.request.id, time.monotonic()]))
    time.sleep(BODY)


def send(seed: int, sends: int, keys: int) -> None:
    """Be a sender."""
    chosen = random.Random(seed)  # the same in each run
    for _ in range(sends):
        doc, before = chosen.randrange(keys), time.monotonic()
        sent = edit.delay(doc)
        after = time.monotonic()
        notes.rpush(SENDS, json.dumps([doc, sent.id, sent.duplicate, before, after]))
        time.sleep(chosen.uniform(0, PAUSE))


if __name__ == "__main__":
    send(*map(int, sys.argv[1:4]))
