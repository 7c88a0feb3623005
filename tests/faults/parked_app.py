"""Tasks that are parked in line, in workers that kill themselves where a test says so.

Everything goes by the task's id, which the test has chosen.  What happens is written into a file in
PARKED_FOLDER, ``events``, a line of JSON each, which a SIGKILL cannot tear.  Whoever comes to a
place for which there is a file ``die-<place>-<task id>`` takes that away and dies: by itself, or
with its whole worker.

PARKED_LOCKS is the lock server, which has the results, too, and PARKED_BROKER the broker.
PARKED_TIMEOUT is that of the leases.
"""

import json
import os
import signal
import time
from functools import wraps
from pathlib import Path

from celery import Celery

from celery_dislock import Dislock, SingletonTask, current_lease
from celery_dislock.locks.lease import Lease
from celery_dislock.messages.message import TaskParked
from celery_dislock.parking.park import Parking
from celery_dislock.parking.publisher import Publisher
from celery_dislock.parking.store import Lines
from celery_dislock.signals import lock_acquired, lock_released

STEP = 0.005  # seconds between two steps of a body
ACKNOWLEDGED = 0.5  # seconds in which a main process has acknowledged what a child has begun
FOLDER = Path(os.environ.get("PARKED_FOLDER", "."))

app = Celery("parked", broker=os.environ.get("PARKED_BROKER"))
app.conf.update(
    result_backend=os.environ.get("PARKED_LOCKS"),
    dislock_url=os.environ.get("PARKED_LOCKS"),
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=1,
    dislock_watchdog_timeout=float(os.environ.get("PARKED_TIMEOUT", "30")),
)
dislock = Dislock(app)
events = os.open(FOLDER / "events", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def record(what, task_id, **more):
    """Add a line to the events."""
    event = {"what": what, "id": task_id, "pid": os.getpid(), "at": time.monotonic(), **more}
    os.write(events, json.dumps(event).encode() + b"\n")


def place(name, task_id):
    """Die here, where a test says so; once."""
    marker = FOLDER / f"die-{name}-{task_id}"
    try:
        victim = marker.read_text()
        marker.unlink()
    except FileNotFoundError:
        return
    record("dies", task_id, place=name)
    if victim == "worker":
        time.sleep(ACKNOWLEDGED)  # nobody but the broker could tell
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def before(owner, name):
    """Put what is decorated before a method."""

    def decorate(hook):
        method = getattr(owner, name)

        @wraps(method)
        def hooked(*args, **kwargs):
            hook(*args)
            return method(*args, **kwargs)

        setattr(owner, name, hooked)

    return decorate


def after(owner, name, error):
    """Put what is decorated behind a method that raises this."""

    def decorate(hook):
        method = getattr(owner, name)

        @wraps(method)
        def hooked(*args, **kwargs):
            try:
                return method(*args, **kwargs)
            except error:
                hook(*args)
                raise

        setattr(owner, name, hooked)

    return decorate


@before(Publisher, "hand_over")
def _turn_was_given(_postman, turns):
    for turn in turns:
        task_id = turn.ticket.rsplit(":", 2)[0]
        record("turn", task_id)
        place("turn", task_id)


@before(Lines, "park")
def _is_about_to_be_parked(_lines, _lock, _owner, _ttl, _holder, ticket):
    if ticket.message:
        place("parking", ticket.name.rsplit(":", 2)[0])


@after(Parking, "park", TaskParked)
def _was_parked(parking, *_):
    record("parked", parking._delivery.id)
    place("parked", parking._delivery.id)


@lock_acquired.connect(weak=False)
def _has_claimed(lease, **_):
    place("claimed", lease.holder["id"])


@before(Lease, "release")
def _is_about_to_release(lease, *_):
    place("ended", lease.holder["id"])


@lock_released.connect(weak=False)
def _has_released(lease, **_):
    record("released", lease.holder["id"], key=lease.key, token=lease.token)


@before(Lines, "sweep")
def _sweeps(_lines, locks, _newer=None):
    record("sweep", "", locks=len(locks))


def body(task, seconds, gated):
    """Last so long, and until the gate is open where there is one."""
    lease = current_lease()
    task_id = task.request.id
    about = {"key": lease.key, "token": lease.token}
    record("begin", task_id, **about)
    place("body", task_id)
    until = time.monotonic() + seconds
    while True:
        if time.monotonic() >= until and (not gated or (FOLDER / f"gate-{task_id}").exists()):
            break
        time.sleep(STEP)
    record("end", task_id, **about)
    return task_id


QUEUED = {"bind": True, "base": SingletonTask, "lock_key": "<key>", "lock_on_conflict": "queue"}


@app.task(name="late", acks_late=True, reject_on_worker_lost=True, **QUEUED)
def late(self, key, seconds=0.02, gated=False):
    """Acknowledged when it has ended."""
    return body(self, seconds, gated)


@app.task(name="early", **QUEUED)
def early(self, key, seconds=0.02, gated=False):
    """Acknowledged before it begins."""
    return body(self, seconds, gated)


@app.task(name="note")
def note(what):
    """Take no lock; stands behind a task in a chain."""
    record("note", what)
