"""A unique task, in workers that are killed and in senders that kill themselves.

UNIQUE_LOCKS is the lock server, UNIQUE_BROKER the broker.  What runs is pushed to the list "ran" on
UNIQUE_NOTES, or on the lock server, and waits there until there is a key "gate".  With UNIQUE_DIES
a worker dies when one of its tasks learns that it was replaced, and a newer one has run.

As a program it sends one message and dies at the place that its first argument names; the other
arguments are the document and the edition.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import redis
from celery import Celery

from celery_dislock import Dislock, SingletonTask
from celery_dislock.servers.reservations import Reservations
from celery_dislock.tasks import conflicts

UNIQUE_FOR = 30.0  # seconds
TIMEOUT = 2.0  # seconds: lock_watchdog_timeout
NOTES = os.environ.get("UNIQUE_NOTES", os.environ.get("UNIQUE_LOCKS", ""))

app = Celery("unique", broker=os.environ.get("UNIQUE_BROKER"))
app.conf.update(
    dislock_url=os.environ.get("UNIQUE_LOCKS"),
    broker_connection_retry_on_startup=True,
    task_acks_late=True,
    worker_prefetch_multiplier=200,
)
dislock = Dislock(app)


def unique(name, **options):
    """Declare the task under a name of its own."""

    @app.task(
        name=name,
        base=SingletonTask,
        shared=False,
        lock_key=f"{name}:<doc>",
        lock_unique_for=UNIQUE_FOR,
        lock_watchdog_timeout=TIMEOUT,
        ignore_result=True,
        **{"lock_on_conflict": "retry", **options},
    )
    def run(doc, edition=0):
        with redis.Redis.from_url(NOTES) as client:
            client.rpush("ran", f"{name}:{doc}:{edition}")
            while not client.exists("gate"):
                time.sleep(0.02)

    return run


edit = unique("edit", lock_unique_until="end")
index = unique(  # as docs/how-to/send-once.md has it
    "index", lock_unique_until="start", lock_on_duplicate="replace", lock_on_conflict="queue"
)


def die_at(place):
    """Let this process die before or after it reserves, publishes or confirms."""
    when, _, what = place.partition(" ")
    owner, name = {
        "reserve": (Reservations, "reserve"),
        "publish": (app.amqp, "send_task_message"),
        "confirm": (Reservations, "confirm"),
    }[what]
    call = getattr(owner, name)

    def dying(*args, **kwargs):
        if when == "after":
            call(*args, **kwargs)
        os._exit(9)

    setattr(owner, name, dying)


def die_when_told(_delivery, _replaced, _process):
    """Kill this worker, whose task has learned that it must not run."""
    with redis.Redis.from_url(NOTES) as client:
        while not client.llen("ran"):
            time.sleep(0.02)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if "UNIQUE_DIES" in os.environ:
    conflicts.end_replaced = die_when_told


if __name__ == "__main__":
    _, place, name, doc, edition = sys.argv
    # As a program this module is not the one that workers import; the tasks have names.
    die_at(place)
    app.send_task(name, (doc, int(edition)))
