"""Tasks that bring about one situation each: what the acceptance tests run in real workers.

Every task takes the *key* of its lock, so that each test has locks of its own.  A body reports its
begin and its end to a list in Redis, through a client that has nothing to do with the locks; the
order of that list is the order in which things happened.  Most bodies last until the test opens
the gate of their key: a test waits for what it wants to see, and for no time.

The expiry is a long one, so a lock that is free soon after its task was released, and did not run
out.  Where a scenario is about renewals, its expiry is `BRIEF`.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import redis
from celery import Celery, current_task
from celery.exceptions import Ignore, Reject

from celery_dislock import Dislock, SingletonTask, current_lease

if TYPE_CHECKING:
    from collections.abc import Iterator

    from celery import Task

LONG = 60.0  # seconds: longer than any test waits for a lock to be free
BRIEF = 1.5  # seconds: a lease that is renewed twice a second
GATE_POLL = 0.02  # seconds between two looks at a gate
PAUSE = 0.5  # seconds between a result and the end of its execution
ASLEEP = 60.0  # seconds of one blocking call
URL = os.environ.get("SCENARIOS_URL", "redis://localhost:6379/0")

app = Celery("scenarios", broker=URL, backend=URL)
app.conf.update(
    broker_connection_retry_on_startup=True,
    broker_transport_options={
        "visibility_timeout": float(os.environ.get("SCENARIOS_VISIBILITY_TIMEOUT", "3600")),
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    },
    dislock_watchdog_timeout=LONG,
    result_chord_retry_interval=0.1,
    worker_prefetch_multiplier=1,
)
dislock = Dislock(app)
reports = redis.Redis.from_url(URL)


def history_of(key: str) -> str:
    """Name of the list that the tasks of this key report to."""
    return f"history:{key}"


def gate_of(key: str) -> str:
    """Name of the gate of this key: open when it exists."""
    return f"gate:{key}"


def report(key: str, what: str, **more: Any) -> None:
    """Add what happens in the current execution to the history of its key."""
    lease = current_lease()
    event = {
        "what": what,
        "id": current_task.request.id,
        "pid": os.getpid(),
        "token": lease.token if lease is not None else None,
        **more,
    }
    reports.rpush(history_of(key), json.dumps(event))


@contextmanager
def reported(key: str) -> Iterator[None]:
    """Report the begin and the end of a body, and what ended it."""
    report(key, "begin")
    try:
        yield
    except BaseException as exc:
        report(key, "end", error=type(exc).__name__)
        raise
    report(key, "end", error=None)


def stay(key: str) -> dict[str, Any]:
    """Last until the gate of this key is open, then tell what became of the lease."""
    with reported(key):
        while not reports.exists(gate_of(key)):
            time.sleep(GATE_POLL)
        lease = current_lease()
        if lease is None:
            return {"held": None}
        return {"held": lease.held, "renewals": lease.renewals, "token": lease.token}


# The body lasts as long as the test wants.


@app.task(base=SingletonTask, lock_key="<key>")
def hold(key: str) -> dict[str, Any]:
    """Hold the lock until the gate is open."""
    return stay(key)


@app.task(base=SingletonTask, lock_key="<key>", lock_watchdog_timeout=BRIEF)
def hold_renewed(key: str) -> dict[str, Any]:
    """Hold the lock until the gate is open, by many renewals."""
    return stay(key)


@app.task(base=SingletonTask, lock_key="<key>", lock_expire=BRIEF)
def hold_without_renewal(key: str) -> dict[str, Any]:
    """Outlive a lease of a fixed expiry."""
    return stay(key)


@app.task(base=SingletonTask, lock_key="<key>", lock_mode="shared")
def hold_shared(key: str) -> dict[str, Any]:
    """Hold the lock beside others of this kind until the gate is open."""
    return stay(key)


@app.task(base=SingletonTask, lock_key="<key>", lock_limit=2)
def hold_one_of_two(key: str) -> dict[str, Any]:
    """Hold one of two leases until the gate is open."""
    return stay(key)


@app.task(base=SingletonTask, lock_key="<key>", lock_on_conflict="raise")
def hold_or_raise(key: str) -> dict[str, Any]:
    """Hold the lock, or fail where another does."""
    return stay(key)


@app.task(
    base=SingletonTask, lock_key="<key>", acks_late=True, reject_on_worker_lost=True, max_retries=5
)
def hold_and_survive(key: str) -> dict[str, Any]:
    """Hold the lock, and come back to the queue if the process dies."""
    return stay(key)


@app.task(base=SingletonTask, lock_key="<key>", release_on_failure=False)
def hold_or_keep(key: str) -> dict[str, Any]:
    """Hold the lock until the gate is open, or leave it to expire where that goes wrong."""
    return stay(key)


@app.task(lock_key="<key>")
def plain_hold(key: str) -> dict[str, Any]:
    """Hold the lock where the worker runs with --dislock: no base class asks for it."""
    return stay(key)


class Counting(SingletonTask):
    """A user's class with a ``__call__`` of its own, which knows nothing of locks."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Count the call, then run the body."""
        lease = current_lease()
        report(kwargs.get("key") or args[0], "called", leased=lease is not None)
        return super().__call__(*args, **kwargs)


@app.task(base=Counting, lock_key="<key>")
def hold_counted(key: str) -> dict[str, Any]:
    """Hold the lock in a class with a ``__call__`` of its own."""
    return stay(key)


# The body is over at once.


@app.task(base=SingletonTask, lock_key="<key>")
def step(key: str, seconds: float = 0.0) -> dict[str, Any]:
    """Do a little, and succeed."""
    with reported(key):
        time.sleep(seconds)
        lease = current_lease()
        return {"held": lease is not None and lease.held}


class SlowToEnd(SingletonTask):
    """A user's class that takes its time after the body, when callers know the result already."""

    abstract = True

    def on_success(self, *_: Any) -> None:
        """Keep the execution from its end."""
        time.sleep(PAUSE)


@app.task(base=SlowToEnd, lock_key="<key>")
def step_slowly(key: str) -> dict[str, Any]:
    """Do a little, and succeed, and be slow to end."""
    with reported(key):
        lease = current_lease()
        return {"held": lease is not None and lease.held}


@app.task
def gather(results: list[Any]) -> list[Any]:
    """End a chord."""
    return results


@app.task(base=SingletonTask, lock_key="<key>")
def fail(key: str) -> None:
    """Fail."""
    with reported(key):
        raise ValueError(key)


@app.task(base=SingletonTask, lock_key="<key>", bind=True)
def retry_once(self: Task, key: str) -> int:
    """Ask for one retry, then succeed."""
    with reported(key):
        if not self.request.retries:
            raise self.retry(countdown=0)
        return int(self.request.retries)


@app.task(
    base=SingletonTask,
    lock_key="<key>",
    bind=True,
    autoretry_for=(ConnectionError,),
    retry_kwargs={"countdown": 0},
)
def autoretry_once(self: Task, key: str) -> int:
    """Be retried by Celery once, then succeed."""
    with reported(key):
        if not self.request.retries:
            raise ConnectionError(key)
        return int(self.request.retries)


@app.task(base=SingletonTask, lock_key="<key>", bind=True, release_on_failure=False)
def retry_once_or_keep(self: Task, key: str) -> int:
    """Ask for one retry, then succeed; a failure would leave the lock to expire."""
    with reported(key):
        if not self.request.retries:
            raise self.retry(countdown=0)
        return int(self.request.retries)


@app.task(base=SingletonTask, lock_key="<key>")
def ignore(key: str) -> None:
    """Leave without a result."""
    with reported(key):
        raise Ignore


@app.task(base=SingletonTask, lock_key="<key>", acks_late=True)
def reject(key: str) -> None:
    """Refuse the message for good."""
    with reported(key):
        raise Reject(key, requeue=False)


@app.task(base=SingletonTask, lock_key="<key>", acks_late=True)
def reject_once(key: str) -> str:
    """Give the message back to its queue once, then succeed."""
    with reported(key):
        if not reports.exists(gate_of(key)):
            reports.set(gate_of(key), "open")
            raise Reject(key, requeue=True)
        return key


@app.task(base=SingletonTask, lock_key="<key>", release_on_failure=False)
def fail_and_keep(key: str) -> None:
    """Fail, and leave the lock to expire."""
    with reported(key):
        raise ValueError(key)


@app.task(base=SingletonTask, lock_key="<key>", release_on_success=False)
def succeed_and_keep(key: str) -> None:
    """Succeed, and leave the lock to expire."""
    with reported(key):
        pass


@app.task(base=SingletonTask, lock_key="<key>", lock_at_least_for=LONG)
def linger(key: str) -> None:
    """Succeed at once, and keep the lock a minute all the same."""
    with reported(key):
        pass


# The lease ends before the body does.


@app.task(base=SingletonTask, lock_key="<key>", lock_watchdog_timeout=BRIEF, max_renew_times=2)
def outlive_cap(key: str) -> dict[str, Any]:
    """Run on after the cap, without the lock."""
    return stay(key)


@app.task(
    base=SingletonTask,
    lock_key="<key>",
    lock_watchdog_timeout=BRIEF,
    max_renew_times=2,
    lock_on_cap="raise",
)
def stop_at_cap(key: str) -> dict[str, Any]:
    """Get LockLostError at the cap."""
    return stay(key)


@app.task(
    base=SingletonTask,
    lock_key="<key>",
    lock_watchdog_timeout=BRIEF,
    max_renew_times=2,
    lock_on_cap="terminate",
)
def resist_errors(key: str) -> dict[str, Any]:
    """Go on after any Exception, and be terminated at the cap all the same."""
    while True:
        try:
            return stay(key)
        except Exception as exc:  # noqa: BLE001  # the point of this task
            report(key, "resisted", error=type(exc).__name__)


@app.task(
    base=SingletonTask,
    lock_key="<key>",
    lock_watchdog_timeout=BRIEF,
    max_renew_times=2,
    lock_on_cap="terminate",
)
def resist_everything(key: str) -> None:
    """Go on after any exception at all; only the end of the process ends this body."""
    report(key, "begin")
    while True:
        try:
            time.sleep(ASLEEP)
        except BaseException as exc:  # noqa: BLE001  # the point of this task
            report(key, "resisted", error=type(exc).__name__)


@app.task(base=SingletonTask, lock_key="<key>", lock_watchdog_timeout=BRIEF)
def outlive_loss(key: str) -> dict[str, Any]:
    """Run on after the lease is lost, with a warning."""
    return stay(key)


@app.task(base=SingletonTask, lock_key="<key>", lock_watchdog_timeout=BRIEF, lock_on_lost="raise")
def stop_at_loss(key: str) -> dict[str, Any]:
    """Get LockLostError when the lease is lost."""
    return stay(key)


@app.task(base=SingletonTask, lock_key="<key>", lock_watchdog_timeout=BRIEF, lock_on_lost="raise")
def sleep_until_loss(key: str) -> None:
    """Get LockLostError in the middle of one long blocking call."""
    with reported(key):
        time.sleep(ASLEEP)
