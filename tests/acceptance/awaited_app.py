"""Tasks for a pool that awaits their bodies, beside those of :mod:`tests.acceptance.scenarios`.

That pool runs a body where Celery's tracer is not, so there is no ``current_task``.
"""

import asyncio
import json
import os
import time
from contextlib import contextmanager

from celery.exceptions import Ignore, Reject

from celery_dislock import SingletonTask, current_lease, ensure_held
from tests.acceptance.scenarios import (
    ASLEEP,
    BRIEFLY,
    CAPPED,
    GATE_POLL,
    LATE,
    app,
    dislock,
    gate_of,
    history_of,
    reports,
)


@contextmanager
def reported(task, key):
    """Report the begin and the end of a body, and what ended it."""

    def report(what, **more):
        event = {"what": what, "id": task.request.id, "pid": os.getpid(), "token": task.lease.token}
        reports.rpush(history_of(key), json.dumps({**event, **more}))

    report("begin")
    try:
        yield
    except BaseException as exc:
        report("end", error=type(exc).__name__)
        raise
    report("end", error=None)


async def stay(self, key):
    """Last until the gate of the key is open."""
    with reported(self, key):
        while not reports.exists(gate_of(key)):  # noqa: ASYNC110 -- a test opens it
            await asyncio.sleep(GATE_POLL)
        return {"held": self.lease.held, "renewals": self.lease.renewals}


def stay_plain(self, key):
    """Do so in a thread."""
    with reported(self, key):
        while not reports.exists(gate_of(key)):
            time.sleep(GATE_POLL)
        return {"held": self.lease.held, "renewals": self.lease.renewals}


async def sleep_long(self, key):
    """Sleep until somebody stops it."""
    with reported(self, key):
        await asyncio.sleep(ASLEEP)


async def end_as(self, key, how):
    """Let go of the loop, and end."""
    with reported(self, key):
        await asyncio.sleep(0)
        if how == "fail":
            raise ValueError(key)
        if how == "retry" and not self.request.retries:
            raise self.retry(countdown=0)
        if how == "ignore":
            raise Ignore
        if how == "reject":
            raise Reject(key, requeue=False)
        if how == "cancel":
            raise asyncio.CancelledError
        return int(self.request.retries)


async def take_again(self, key):
    """Take the lock of this task again, and let another coroutine try it."""
    with reported(self, key):
        ensure_held()
        lock = dislock.async_lock(key)
        refused = await asyncio.create_task(lock.try_acquire())
        async with lock as lease:
            return {
                "same": lease is self.lease is current_lease(),
                "refused": refused.holder["id"],
                "lost": await asyncio.to_thread(lambda: lease.lost),
            }


def locked(name, body=stay, **options):
    """Declare a task with this body."""
    options = {"base": SingletonTask, "bind": True, "lock_key": "<key>", **options}
    return app.task(body, name=f"{__name__}.{name}", **options)


hold = locked("hold")
hold_plain = locked("hold_plain", stay_plain)
hold_renewed = locked("hold_renewed", **BRIEFLY)
hold_or_wait = locked("hold_or_wait", lock_on_conflict="wait")
hold_or_retry = locked("hold_or_retry", lock_on_conflict="retry")
hold_or_queue = locked("hold_or_queue", lock_on_conflict="queue")
end = locked("end", end_as, **LATE)
again = locked("again", take_again, lock_on_lost="raise")
stop_at_loss = locked("stop_at_loss", sleep_long, lock_on_lost="raise", **BRIEFLY)
terminate_at_loss = locked("terminate_at_loss", sleep_long, lock_on_lost="terminate", **BRIEFLY)
stop_at_cap = locked("stop_at_cap", sleep_long, lock_on_cap="raise", **CAPPED)
