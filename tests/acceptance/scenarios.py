"""Tasks that bring about one situation each: what the acceptance tests run in real workers.

Every task takes the *key* of its lock, so that each test has locks of its own.  A body reports its
begin and its end to a list in Redis, through a client that has nothing to do with the locks; the
order of that list is the order in which things happened.  Most bodies last until the test opens
the gate of their key: a test waits for what it wants to see, and for no time.

The expiry is a long one, so a lock that is free soon after its task was released, and did not run
out.  Where a scenario is about renewals, its expiry is `BRIEF`.

SCENARIOS_URL is the Redis of all that: lock server, result backend, reports, and the broker where
SCENARIOS_BROKER_URL names no other.  SCENARIOS_CONF, in JSON, adds to the configuration.
"""

from __future__ import annotations

import ctypes
import json
import os
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import redis
from celery import Celery, current_task
from celery.exceptions import Ignore, Reject, Retry

from celery_dislock import Dislock, LockLostError, SingletonTask, current_lease
from celery_dislock.signals import lock_released

if TYPE_CHECKING:
    from collections.abc import Iterator

    from celery import Task

    from celery_dislock import Lease
    from celery_dislock.locks.attempt import Conflict

LONG = 60.0  # seconds: longer than any test waits for a lock to be free
BRIEF = 1.5  # seconds: a lease that is renewed twice a second
STEADY = 9.0  # seconds: a lease that is renewed now and then, and outlives a short outage
GATE_POLL = 0.02  # seconds between two looks at a gate
PAUSE = 0.5  # seconds between a result and the end of its execution
ASLEEP = 60.0  # seconds of one blocking call
TOLD = (  # of a request, by the body that is asked to tell what came along
    "id",
    "retries",
    "headers",
    "expires",
    "stamps",
    "stamped_headers",
    "root_id",
    "parent_id",
    "group",
    "shadow",
)
URL = os.environ.get("SCENARIOS_URL", "redis://localhost:6379/0")
BROKER_URL = os.environ.get("SCENARIOS_BROKER_URL", URL)
REDELIVERY = {  # RabbitMQ has no such options
    "visibility_timeout": float(os.environ.get("SCENARIOS_VISIBILITY_TIMEOUT", "3600")),
    "unacked_restore_interval": 1,
    "unacked_restore_throttle": 1,
}

app = Celery("scenarios", broker=BROKER_URL, backend=URL)
app.task = partial(app.task, shared=False)  # other apps of a process are to know nothing of these
app.conf.update(
    broker_connection_retry_on_startup=True,
    broker_transport_options=REDELIVERY if BROKER_URL.startswith("redis") else {},
    dislock_url=URL if BROKER_URL != URL else None,
    dislock_watchdog_timeout=LONG,
    result_chord_retry_interval=0.1,
    worker_prefetch_multiplier=1,
)
app.conf.update(json.loads(os.environ.get("SCENARIOS_CONF", "{}")))
dislock = Dislock(app)
reports = redis.Redis.from_url(URL)


def history_of(key: str) -> str:
    """Name of the list that the tasks of this key report to."""
    return f"history:{key}"


def releases_of(key: str) -> str:
    """Name of the list of the signals ``lock_released`` about this key."""
    return f"releases:{key}"


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


@lock_released.connect
def report_release(lease: Lease, **_: Any) -> None:
    """Add a release to the list of its key; in the history its place would be left to chance."""
    if not current_task or current_task.app is not app:
        return
    event = {"id": lease.holder.get("id"), "pid": os.getpid(), "token": lease.token}
    reports.rpush(releases_of(lease.key), json.dumps(event))


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


def stay(key: str, gate: str | None = None) -> dict[str, Any]:
    """Last until the gate, mostly that of the key, is open; then tell what became of the lease."""
    with reported(key):
        while not reports.exists(gate_of(gate or key)):
            time.sleep(GATE_POLL)
        lease = current_lease()
        if lease is None:
            return {"held": None}
        return {"held": lease.held, "renewals": lease.renewals, "token": lease.token}


def lease_in_words() -> dict[str, Any]:
    """Tell what became of the lease, after asking for it as careful code does."""
    lease = current_lease()
    assert lease is not None
    try:
        lease.ensure_held()
    except LockLostError as exc:
        return {"held": False, "why": str(exc)}
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


@app.task(base=SingletonTask, lock_key="<key>", lock_watchdog_timeout=BRIEF)
def compute(key: str, gate: str) -> dict[str, Any]:
    """Compute until a file is there, and never yield to another greenlet."""
    with reported(key):
        while not os.path.exists(gate):  # noqa: PTH110 -- as short as can be
            pass
        return lease_in_words()


@app.task(base=SingletonTask, lock_key="<key>", lock_watchdog_timeout=BRIEF)
def hold_the_gil(key: str, seconds: float) -> dict[str, Any]:
    """Let no other thread of this process run for some seconds."""
    with reported(key):
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))
        return lease_in_words()


@app.task(base=SingletonTask, lock_key="<key>", lock_watchdog_timeout=STEADY)
def hold_steadily(key: str) -> dict[str, Any]:
    """Hold the lock until the gate is open, by renewals that may fail for a while."""
    return stay(key)


@app.task(base=SingletonTask, lock_key="<key>", bind=True)
def hold_by_itself(self: Task, key: str) -> dict[str, Any]:
    """Hold the lock until a gate is open that is this task's alone."""
    return stay(key, gate=self.request.id)


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


@app.task(
    base=SingletonTask,
    lock_key="<key>",
    acks_late=True,
    reject_on_worker_lost=True,
    lock_watchdog_timeout=BRIEF,
)
def hold_renewed_and_survive(key: str) -> dict[str, Any]:
    """Hold the lock by many renewals, and come back to the queue if the worker dies."""
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


class HangsAfterIt(SingletonTask):
    """A user's class whose execution hangs after the body, as if the result backend is away."""

    abstract = True

    def on_success(self, *_: Any) -> None:
        """Hang until the gate named after this task's id is open."""
        while not reports.exists(gate_of(self.request.id)):
            time.sleep(GATE_POLL)


@app.task(base=HangsAfterIt, lock_key="<key>", lock_watchdog_timeout=4 * BRIEF)
def hang_after_it(key: str) -> dict[str, Any]:
    """Hold the lock until the gate is open, and hang then."""
    return stay(key)


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


@app.task
def start(canvas: dict[str, Any]) -> Any:
    """Send a canvas; return its result, written down."""
    return app.signature(canvas).apply_async().as_tuple()


@app.task(base=SingletonTask, lock_key="<key>")
def fail(key: str) -> None:
    """Fail."""
    with reported(key):
        raise ValueError(key)


@app.task(base=SingletonTask, lock_key="<key>")
def leave_the_process(key: str) -> None:
    """End the process in the middle of the body, in Python's way."""
    with reported(key):
        raise SystemExit(key)


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


@app.task(
    base=SingletonTask,
    lock_key="<key>",
    lock_at_least_for=LONG,
    lock_on_conflict="queue",
    lock_queue_limit=1,
    lock_queue_overflow="replace",
)
def linger_newest(key: str) -> None:
    """As linger; of those that come meanwhile the newest has its turn."""
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


# The second of a key comes again, waits, gives up or asks.


@app.task(base=SingletonTask, lock_key="<key>", lock_on_conflict="retry")
def hold_or_retry(key: str) -> dict[str, Any]:
    """Hold the lock until the gate is open, or come again later."""
    return stay(key)


@app.task(base=SingletonTask, lock_key="<key>", lock_on_conflict="retry", lock_retry_for=1)
def hold_or_retry_briefly(key: str) -> dict[str, Any]:
    """Hold the lock until the gate is open, or come again once."""
    return stay(key)


@app.task(base=SingletonTask, lock_key="<key>", lock_on_conflict="wait", lock_wait_timeout=LONG)
def hold_or_wait(key: str) -> dict[str, Any]:
    """Hold the lock until the gate is open, or wait for it."""
    return stay(key)


@app.task(
    base=SingletonTask,
    lock_key="<key>",
    lock_on_conflict="wait",
    lock_wait_timeout=LONG,
    acks_late=True,
)
def hold_or_wait_late(key: str) -> dict[str, Any]:
    """Wait for the lock, in a message that outlives its worker."""
    return stay(key)


@app.task(base=SingletonTask, lock_key="<key>", lock_on_conflict="wait", lock_wait_timeout=PAUSE)
def hold_or_wait_briefly(key: str) -> dict[str, Any]:
    """Hold the lock until the gate is open, or wait for it a little."""
    return stay(key)


@app.task(base=SingletonTask, lock_key="<key>", lock_on_conflict="reject", acks_late=True)
def hold_or_reject(key: str) -> dict[str, Any]:
    """Hold the lock until the gate is open, or give the message back for good."""
    return stay(key)


def decide(task: Task, conflict: Conflict) -> str | None:
    """Do what the task is told to: a test of callables sends it along."""
    answer = task.request.headers["answer"]
    if answer == "a bug":
        raise ZeroDivisionError(conflict.key)
    if answer == "Ignore":
        raise Ignore
    if answer == "Reject":
        raise Reject(conflict.key)
    if answer == "Retry":
        raise Retry
    if answer == "task.retry":
        raise task.retry(countdown=0)
    return str(answer) if answer else None


@app.task(
    base=SingletonTask, lock_key="<key>", lock_on_conflict=decide, max_retries=None, acks_late=True
)
def hold_or_decide(key: str) -> dict[str, Any]:
    """Hold the lock until the gate is open, or do what :func:`decide` says."""
    return stay(key)


@app.task(base=SingletonTask, lock_key="<key>", lock_on_conflict="retry", bind=True)
def tell_or_retry(self: Task, key: str, extra: str = "") -> dict[str, Any]:
    """Tell what came along with the message."""
    with reported(key):
        request = self.request
        told = {name: getattr(request, name) for name in TOLD}
        return {**told, "priority": request.delivery_info["priority"], "extra": extra}


# The second of a key is not sent.


@app.task(base=SingletonTask, lock_key="<key>", lock_unique_until="start")
def unique_in_queue(key: str) -> dict[str, Any]:
    """Hold the lock until the gate is open, or be parked; one message waits at a time."""
    return stay(key)


@app.task(
    base=SingletonTask, lock_key="<key>", lock_unique_until="start", lock_watchdog_timeout=BRIEF
)
def unique_in_queue_renewed(key: str) -> dict[str, Any]:
    """As unique_in_queue, with a lock that is free soon after its worker has died."""
    return stay(key)


@app.task(base=SingletonTask, lock_key="<key>", lock_unique_until="start", lock_on_conflict="skip")
def unique_or_skip(key: str) -> dict[str, Any]:
    """Hold the lock until the gate is open, or be skipped; one message waits at a time."""
    return stay(key)


@app.task(
    base=SingletonTask,
    lock_key="<key>",
    lock_unique_until="end",
    lock_watchdog_timeout=BRIEF,
)
def unique_to_the_end(key: str) -> dict[str, Any]:
    """Hold the lock until the gate is open; one message waits or runs at a time."""
    return stay(key)


@app.task(base=SingletonTask, lock_key="<key>", lock_unique_until="end", lock_expire=BRIEF)
def unique_beyond_its_lock(key: str) -> dict[str, Any]:
    """Outlive a lease of a fixed expiry; one message waits or runs at a time."""
    return stay(key)


@app.task(
    base=SingletonTask,
    lock_key="<key>",
    lock_unique_until="end",
    acks_late=True,
    reject_on_worker_lost=True,
    lock_watchdog_timeout=BRIEF,
)
def unique_and_survive(key: str) -> dict[str, Any]:
    """As unique_to_the_end, and come back to the queue if the process dies."""
    return stay(key)


@app.task(base=SingletonTask, lock_key="<key>", lock_unique_until="end", lock_limit=None)
def unique_without_lock(key: str) -> dict[str, Any]:
    """Stay until the gate is open, without a lock; one message waits or runs at a time."""
    return stay(key)


@app.task(base=SingletonTask, lock_key="<key>", lock_unique_until="end", bind=True)
def unique_retry_once(self: Task, key: str) -> int:
    """Ask for one retry, then succeed; the key stays reserved in between."""
    with reported(key):
        if not self.request.retries:
            raise self.retry(countdown=1)
        return int(self.request.retries)


@app.task(base=SingletonTask, lock_key="<key>", lock_unique_until="end")
def unique_fail(key: str) -> None:
    """Fail."""
    with reported(key):
        raise ValueError(key)


@app.task(base=SingletonTask, lock_key="<key>", lock_unique_until="expiry", lock_unique_for=LONG)
def unique_for_a_while(key: str) -> str:
    """Do a little; one message in a minute."""
    with reported(key):
        return key


@app.task(lock_key="<key>", lock_unique_until="end")
def plain_unique(key: str) -> dict[str, Any]:
    """Stay until the gate is open; no base class asks for a lock."""
    return stay(key)


def edition_of(key: str, edition: int) -> int:
    """Report an edition that begins, and last until the gate is open."""
    report(key, "ran", edition=edition)
    stay(key)
    return edition


@app.task(
    base=SingletonTask,
    lock_key="<key>",
    lock_unique_until="start",
    lock_on_duplicate="replace",
    lock_replace_for=LONG,
)
def index(key: str, edition: int) -> int:
    """Tell the edition: the debounce of docs/how-to/send-once.md."""
    return edition_of(key, edition)


@app.task(
    base=SingletonTask,
    lock_key="<key>",
    lock_unique_until="start",
    lock_on_duplicate="replace",
    lock_on_conflict="wait",
    lock_wait_timeout=LONG,
)
def index_or_wait(key: str, edition: int) -> int:
    """As index, and waits in its slot if the lock is held."""
    return edition_of(key, edition)


UNIQUE_IN_LINE = {
    "base": SingletonTask,
    "lock_key": "<key>",
    "lock_on_conflict": "queue",
    "lock_queue_limit": 1,
    "lock_queue_overflow": "replace",
}


@app.task(**UNIQUE_IN_LINE, lock_unique_until="start")
def unique_newest_until_start(key: str) -> dict[str, Any]:
    """Hold the lock until the gate is open, or be parked in place of the one that was."""
    return stay(key)


@app.task(**UNIQUE_IN_LINE, lock_unique_until="end")
def unique_newest_until_end(key: str) -> dict[str, Any]:
    """As unique_newest_until_start; one message waits or runs at a time."""
    return stay(key)


@app.task(**UNIQUE_IN_LINE, lock_unique_until="start", lock_on_duplicate="replace")
def index_in_line(key: str, edition: int) -> int:
    """As index, and is parked in place of the one that was."""
    return edition_of(key, edition)


# The second of a key is parked.


@app.task(base=SingletonTask, lock_key="<key>", lock_on_conflict="queue")
def hold_or_queue(key: str) -> dict[str, Any]:
    """Hold the lock until the gate is open, or be parked."""
    return stay(key)


@app.task(
    base=SingletonTask,
    lock_key="<key>",
    lock_on_conflict="queue",
    acks_late=True,
    reject_on_worker_lost=True,
)
def hold_or_queue_late(key: str) -> dict[str, Any]:
    """Be parked, in a message that outlives its worker while the body runs."""
    return stay(key)


@app.task(
    base=SingletonTask,
    lock_key="<key>",
    lock_on_conflict="queue",
    lock_queue_limit=1,
    lock_queue_overflow="replace",
)
def hold_newest(key: str) -> dict[str, Any]:
    """Hold the lock until the gate is open, or be parked in place of who was."""
    return stay(key)


@app.task(base=SingletonTask, lock_key="<key>", lock_on_conflict="queue", lock_queue_limit=1)
def hold_or_be_next(key: str) -> dict[str, Any]:
    """Hold the lock until the gate is open, or be parked where nobody else is."""
    return stay(key)


@app.task(base=SingletonTask, lock_key="<key>", lock_on_conflict="queue", lock_mode="shared")
def hold_shared_or_queue(key: str) -> dict[str, Any]:
    """Hold the lock beside others of this kind, or be parked."""
    return stay(key)


@app.task(base=SingletonTask, lock_key="<key>", lock_on_conflict="queue", lock_limit=2, bind=True)
def hold_one_of_two_or_queue(self: Task, key: str) -> dict[str, Any]:
    """Hold one of two leases until this task's own gate is open, or be parked."""
    return stay(key, gate=self.request.id)


@app.task(base=SingletonTask, lock_key="<key>", lock_on_conflict="queue")
def step_or_queue(key: str, seconds: float = 0.0) -> dict[str, Any]:
    """Do a little, or be parked."""
    with reported(key):
        time.sleep(seconds)
        lease = current_lease()
        return {"held": lease is not None and lease.held}


@app.task(base=SingletonTask, lock_key="<key>", lock_on_conflict="queue")
def fail_or_queue(key: str) -> None:
    """Fail, or be parked."""
    with reported(key):
        raise ValueError(key)


@app.task(base=SingletonTask, lock_key="<key>", lock_on_conflict="queue", acks_late=True)
def reject_once_or_queue(key: str) -> str:
    """Give the message back to its queue once, then succeed; or be parked."""
    with reported(key):
        if not reports.exists(gate_of(key)):
            reports.set(gate_of(key), "open")
            raise Reject(key, requeue=True)
        return key


@app.task(base=SingletonTask, lock_key="<key>", lock_on_conflict="queue", bind=True)
def retry_once_or_queue(self: Task, key: str) -> int:
    """Ask for one retry, then succeed; or be parked."""
    with reported(key):
        if not self.request.retries:
            raise self.retry(countdown=0)
        return int(self.request.retries)


@app.task(base=SingletonTask, lock_key="<key>", lock_on_conflict="queue", bind=True)
def replace_or_queue(self: Task, key: str, other: dict[str, Any]) -> None:
    """Let another task take this one's place; or be parked."""
    with reported(key):
        self.replace(self.app.signature(other))


@app.task(base=SingletonTask, lock_key="<key>", lock_on_conflict="queue", bind=True)
def tell_or_queue(self: Task, key: str, extra: str = "") -> dict[str, Any]:
    """Tell what came along with the message, and where it came from."""
    with reported(key):
        request = self.request
        told = {name: getattr(request, name) for name in (*TOLD, "reply_to", "timelimit")}
        info = request.delivery_info
        told |= {name: info[name] for name in ("exchange", "routing_key", "priority")}
        return {**told, "own_id": request.correlation_id == request.id, "extra": extra}


# The same task twice.


@app.task(
    base=SingletonTask,
    lock_key="<key>",
    lock_dedupe_redelivered=True,
    lock_dedupe_for=LONG,
    acks_late=True,
)
def hold_once(key: str) -> dict[str, Any]:
    """Hold the lock until the gate is open, and never again for the same task id."""
    return stay(key)


# The task goes on in another execution.


@app.task(base=SingletonTask, lock_key="<key>", lock_on_conflict="raise", bind=True)
def retry_and_linger(self: Task, key: str) -> int:
    """Ask for one retry, and take time to end after that."""
    with reported(key):
        if self.request.retries:
            return int(self.request.retries)
        try:
            raise self.retry(countdown=0)
        finally:
            time.sleep(PAUSE)


@app.task(base=SingletonTask, lock_key="<key>", lock_on_conflict="raise", bind=True)
def replace_and_linger(self: Task, key: str, other: dict[str, Any]) -> None:
    """Let another task take this one's place, and take time to end after that."""
    with reported(key):
        try:
            self.replace(self.app.signature(other))
        finally:
            time.sleep(PAUSE)


@app.task(
    base=SingletonTask,
    lock_key="<key>",
    bind=True,
    lock_hold_on_retry=True,
    max_retries=None,
)
def retry_until_open(self: Task, key: str) -> int:
    """Ask for retries until the gate is open, and keep the lock meanwhile."""
    with reported(key):
        if reports.exists(gate_of(key)):
            return int(self.request.retries)
        raise self.retry(countdown=PAUSE)
