"""Tasks that bring about one situation each: what the acceptance tests run in real workers.

First come the bodies, then the tasks: a body with the options of its lock.

Every task takes the *key* of its lock, so that each test has locks of its own.  A body reports its
begin and its end to a list in Redis, through a client that has nothing to do with the locks; the
order of that list is the order in which things happened.  Most bodies last until the test opens
the gate of their key: a test waits for what it wants to see, and for no time.

The expiry is a long one, so a lock that is free soon after its task was released, and did not run
out.  Where a scenario is about renewals, its expiry is `BRIEF`.

SCENARIOS_URL is the Redis of all that: lock server, result backend, reports, and the broker where
SCENARIOS_BROKER_URL names no other.  SCENARIOS_CONF, in JSON, adds to the configuration.
"""

import asyncio
import ctypes
import json
import os
import signal
import time
from contextlib import contextmanager
from functools import partial

import redis
from celery import Celery, current_task
from celery.exceptions import Ignore, Reject

from celery_dislock import Dislock, Key, LockLostError, SingletonTask, current_lease
from celery_dislock.signals import lock_released
from tests.pace import LEASE

LONG = 60.0  # seconds: longer than any test waits for a lock to be free
BRIEF = LEASE  # seconds: a lease that is renewed about once a second
STEADY = 9.0  # seconds: a lease that is renewed now and then, and outlives a short outage
GATE_POLL = 0.02  # seconds between two looks at a gate
PAUSE = 0.5  # seconds between a result and the end of its execution
ASLEEP = 60.0  # seconds of one blocking call
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


def history_of(key):
    """Name of the list that the tasks of this key report to."""
    return f"history:{key}"


def releases_of(key):
    """Name of the list of the signals ``lock_released`` about this key."""
    return f"releases:{key}"


def gate_of(key):
    """Name of the gate of this key: open when it exists."""
    return f"gate:{key}"


def report(key, what, **more):
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
def report_release(lease, **_):
    """Add a release to the list of its key; in the history its place would be left to chance."""
    if not current_task or current_task.app is not app:
        return
    event = {"id": lease.holder.get("id"), "pid": os.getpid(), "token": lease.token}
    reports.rpush(releases_of(lease.key), json.dumps(event))


@contextmanager
def reported(key, **more):
    """Report the begin and the end of a body, and what ended it, wherever that interrupts it."""
    try:
        report(key, "begin", **more)
        yield
    except BaseException as exc:
        report(key, "end", error=type(exc).__name__, **more)
        raise
    report(key, "end", error=None, **more)


def be_brief(key):
    """Tell that it has begun."""
    report(key, "begin")


def stay(key, gate=None):
    """Last until the gate, mostly that of the key, is open; then tell what became of the lease."""
    with reported(key):
        while not reports.exists(gate_of(gate or key)):
            time.sleep(GATE_POLL)
        lease = current_lease()
        if lease is None:
            return {"held": None}
        return {"held": lease.held, "renewals": lease.renewals, "token": lease.token}


def lease_in_words():
    """Tell what became of the lease, after asking for it as careful code does."""
    lease = current_lease()
    assert lease is not None
    try:
        lease.ensure_held()
    except LockLostError as exc:
        return {"held": False, "why": str(exc)}
    return {"held": lease.held, "renewals": lease.renewals, "token": lease.token}


# Bodies.  Those with ``self`` belong to tasks with ``bind=True``.


def call_the_api(key, tenant, gate=None):
    """Work for a tenant until a gate, mostly the tenant's, is open; tell under which locks."""
    lease = current_lease()
    locks = lease.key.split(" + ") if lease else []
    with reported(key, tenant=tenant, locks=locks):
        while not reports.exists(gate_of(gate or tenant)):
            time.sleep(GATE_POLL)
        return {"held": lease is not None and lease.held}


def lock_inside(key, form="one", gate=None):
    """Take a lock in the body, and last until the gate is open."""
    keys = [key, f"{key}-2"] if form == "several" else key
    terms = {"shared": {"mode": "shared"}, "semaphore": {"limit": 2}}.get(form, {})

    async def lock_and_stay():
        async with dislock.async_lock(keys):
            return stay(key, gate)

    if form == "async":
        return asyncio.run(lock_and_stay())
    with dislock.lock(keys, **terms):
        return stay(key, gate)


def compute_until(key, gate):
    """Compute until a file is there, and never yield to another greenlet."""
    with reported(key):
        while not os.path.exists(gate):  # noqa: PTH110 -- as short as can be
            pass
        return lease_in_words()


def keep_the_gil(key, seconds):
    """Let no other thread of this process run for some seconds, whatever signal comes."""
    with reported(key):
        mutex, until = ctypes.create_string_buffer(64), int((time.time() + seconds) * 1e9)
        deadline = (ctypes.c_long * 2)(*divmod(until, 10**9))
        for _ in range(2):
            ctypes.PyDLL(None).pthread_mutex_timedlock(mutex, deadline)
        return lease_in_words()


def keep_the_gil_for_ever(key):
    """Wait for a mutex of C that this thread has: no signal ends that, and no bytecode follows."""
    with reported(key):
        mutex = ctypes.create_string_buffer(64)
        for _ in range(2):
            ctypes.PyDLL(None).pthread_mutex_lock(mutex)


def stay_by_itself(self, key):
    """Last until a gate is open that is this task's alone."""
    return stay(key, gate=self.request.id)


def do_little(key, seconds=0.0):
    """Do a little, for these seconds, and succeed."""
    with reported(key):
        time.sleep(seconds)  # as a body that works
        lease = current_lease()
        return {"held": lease is not None and lease.held}


def raise_error(key):
    """Fail."""
    with reported(key):
        raise ValueError(key)


def leave_process(key):
    """End the process in the middle of the body, in Python's way."""
    with reported(key):
        raise SystemExit(key)


def kill_process(key, times):
    """Kill the process of this body, in so many runs; then succeed."""
    report(key, "begin")
    if reports.llen(history_of(key)) <= times:
        os.kill(os.getpid(), signal.SIGKILL)
    return lease_in_words()


def retry_and_succeed(self, key):
    """Ask for one retry, then succeed."""
    with reported(key):
        if not self.request.retries:
            raise self.retry(countdown=0)
        return int(self.request.retries)


def fail_and_succeed(self, key):
    """Fail once, then succeed."""
    with reported(key):
        if not self.request.retries:
            raise ConnectionError(key)
        return int(self.request.retries)


def raise_ignore(key):
    """Leave without a result."""
    with reported(key):
        raise Ignore


def raise_reject(key):
    """Refuse the message for good."""
    with reported(key):
        raise Reject(key, requeue=False)


def requeue_and_succeed(key):
    """Give the message back to its queue once, then succeed."""
    with reported(key):
        if not reports.exists(gate_of(key)):
            reports.set(gate_of(key), "open")
            raise Reject(key, requeue=True)
        return key


def resist_an_error(key):
    """Go on after any Exception."""
    while True:
        try:
            return stay(key)
        except Exception as exc:  # noqa: BLE001  # the point of this task
            report(key, "resisted", error=type(exc).__name__)


def resist_all(key):
    """Go on after any exception at all; only the end of the process ends this body."""
    report(key, "begin")
    while True:
        try:
            time.sleep(ASLEEP)
        except BaseException as exc:  # noqa: BLE001  # the point of this task
            report(key, "resisted", error=type(exc).__name__)


def ignore_sigterm(key):
    """Go on after the signal that a revoke sends."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return stay(key)


def sleep_long(key):
    """Sleep in one long blocking call."""
    with reported(key):
        time.sleep(ASLEEP)


def retry_until_the_gate_is_open(self, key):
    """Ask for retries until the gate is open."""
    with reported(key):
        if reports.exists(gate_of(key)):
            return int(self.request.retries)
        raise self.retry(countdown=PAUSE)


# What users write themselves.


class SlowToEnd(SingletonTask):
    """A user's class that takes its time after the body, when callers know the result already."""

    abstract = True

    def on_success(self, *_):
        """Keep the execution from its end."""
        time.sleep(PAUSE)


class HangsAfterIt(SingletonTask):
    """A user's class whose execution hangs after the body, as if the result backend is away."""

    abstract = True

    def on_success(self, *_):
        """Hang until the gate named after this task's id is open."""
        while not reports.exists(gate_of(self.request.id)):
            time.sleep(GATE_POLL)


@app.task
def gather(results):
    """End a chord."""
    return results


@app.task
def start(canvas):
    """Send a canvas; return its result, written down."""
    return app.signature(canvas).apply_async().as_tuple()


def locked(name, body=stay, **options):
    """Declare a task with this body, which mostly stays until the gate of its key is open."""
    options = {"base": SingletonTask, "lock_key": "<key>", **options}
    return app.task(body, name=f"{__name__}.{name}", **options)


LATE = {"acks_late": True}
SURVIVING = {"acks_late": True, "reject_on_worker_lost": True}  # comes back to the queue
BRIEFLY = {"lock_watchdog_timeout": BRIEF}
CAPPED = {**BRIEFLY, "max_renew_times": 2}
BOUND = {"bind": True}

hold = locked("hold")
hold_inside = app.task(lock_inside, name=f"{__name__}.hold_inside")
hold_both = locked("hold_both", lock_inside, lock_key="own:<key>")
hold_renewed = locked("hold_renewed", **BRIEFLY)
outlive_loss = locked("outlive_loss", **BRIEFLY)
hold_steadily = locked("hold_steadily", lock_watchdog_timeout=STEADY)
hold_and_ignore_sigterm = locked("hold_and_ignore_sigterm", ignore_sigterm)
hold_by_itself = locked("hold_by_itself", stay_by_itself, **BOUND)
hold_and_survive = locked("hold_and_survive", max_retries=5, **SURVIVING)
hold_renewed_and_survive = locked("hold_renewed_and_survive", **BRIEFLY, **SURVIVING)
hang_after_it = locked("hang_after_it", base=HangsAfterIt, lock_watchdog_timeout=4 * BRIEF)
compute = locked("compute", compute_until, **BRIEFLY)
hold_the_gil = locked("hold_the_gil", keep_the_gil, **BRIEFLY)
hold_it_for_ever = locked(
    "hold_it_for_ever", keep_the_gil_for_ever, lock_on_cap="terminate", **CAPPED
)

# The body is over at once.
step = locked("step", do_little)
step_slowly = locked("step_slowly", do_little, base=SlowToEnd)
fail = locked("fail", raise_error)
leave_the_process = locked("leave_the_process", leave_process)
retry_once = locked("retry_once", retry_and_succeed, **BOUND)
autoretry_once = locked(
    "autoretry_once",
    fail_and_succeed,
    autoretry_for=(ConnectionError,),
    retry_kwargs={"countdown": 0},
    **BOUND,
)
ignore = locked("ignore", raise_ignore)
reject = locked("reject", raise_reject, **LATE)
reject_once = locked("reject_once", requeue_and_succeed, **LATE)

# The body kills its process.
CRASHES_MOST = 3
crash = locked("crash", kill_process, lock_crash_limit=CRASHES_MOST, **SURVIVING)
# The lease ends before the body does.
stop_at_cap = locked("stop_at_cap", lock_on_cap="raise", **CAPPED)
resist_errors = locked("resist_errors", resist_an_error, lock_on_cap="terminate", **CAPPED)
resist_everything = locked("resist_everything", resist_all, lock_on_cap="terminate", **CAPPED)
stop_at_loss = locked("stop_at_loss", lock_on_lost="raise", **BRIEFLY)
sleep_until_loss = locked("sleep_until_loss", sleep_long, lock_on_lost="raise", **BRIEFLY)

# The second of a key comes again, waits, gives up or asks.
WAITING = {"lock_on_conflict": "wait", "lock_wait_timeout": LONG}
hold_or_retry = locked("hold_or_retry", lock_on_conflict="retry")
hold_or_wait = locked("hold_or_wait", **WAITING)
hold_or_wait_late = locked("hold_or_wait_late", **WAITING, **LATE)
hold_or_reject = locked("hold_or_reject", lock_on_conflict="reject", **LATE)

# The second of a key is parked.
QUEUE = {"lock_on_conflict": "queue"}
NEWEST = {**QUEUE, "lock_queue_limit": 1, "lock_queue_overflow": "replace"}
hold_or_queue = locked("hold_or_queue", **QUEUE)
hold_or_queue_late = locked("hold_or_queue_late", **QUEUE, **SURVIVING)
hold_newest = locked("hold_newest", **NEWEST)
hold_shared_or_queue = locked("hold_shared_or_queue", lock_mode="shared", **QUEUE)

# The newest of a key takes over.  No renewal comes before a test gives up: remote control tells.
CANCEL = {"lock_on_conflict": "cancel", "lock_watchdog_timeout": 5 * LONG}
build = locked("build", stay_by_itself, **CANCEL, **BOUND)
build_two = locked("build_two", stay_by_itself, lock_limit=2, **CANCEL, **BOUND)
build_and_survive = locked("build_and_survive", stay_by_itself, **CANCEL, **BOUND, **SURVIVING)
build_renewed = locked("build_renewed", stay_by_itself, **{**CANCEL, **BRIEFLY}, **BOUND)
build_in_peace = locked(
    "build_in_peace", stay_by_itself, lock_cancel_not_before=LONG, **CANCEL, **BOUND
)
build_stubbornly = locked("build_stubbornly", resist_an_error, lock_cancel_after=PAUSE, **CANCEL)
build_for_ever = locked("build_for_ever", resist_all, lock_on_cancel="terminate", **CANCEL)
build_for_ever_late = locked(
    "build_for_ever_late", resist_all, lock_on_cancel="terminate", **CANCEL, **SURVIVING
)
TERMINATED = {**CANCEL, **BRIEFLY, "lock_on_cancel": "terminate"}
build_terminated = locked("build_terminated", stay_by_itself, **TERMINATED, **BOUND, **SURVIVING)
build_in_c = locked("build_in_c", keep_the_gil_for_ever, **TERMINATED)

# Several keys in line: the *key* is that of the reports.
TENANT = "tenant:<tenant>"


def calling(name, *keys, **options):
    """Declare a task that calls the API for a tenant under these keys."""
    return locked(name, call_the_api, lock_key=[*keys], **{**QUEUE, **options})


call = calling("call", Key("api", limit=2), TENANT)
call_and_survive = calling("call_and_survive", Key("api", limit=2), TENANT, **SURVIVING)

# Another strategy since the release before.
IS_OLD = os.environ.get("SCENARIOS_RELEASE") == "old"
build_changed = locked("build_changed", stay_by_itself, **(QUEUE if IS_OLD else CANCEL), **BOUND)

# So often at most.
rated = locked("rated", be_brief, lock_rate="10/s", **QUEUE)
rated_slowly_or_retry = locked(
    "rated_slowly_or_retry", be_brief, lock_rate="1/8s", lock_on_conflict="retry"
)
quickened = locked("quickened", be_brief, lock_rate="1/h" if IS_OLD else "10/s", **QUEUE)

# The second of a key is not sent.
UNTIL_START = {"lock_unique_until": "start"}
UNTIL_END = {"lock_unique_until": "end"}
unique_in_queue_renewed = locked("unique_in_queue_renewed", **UNTIL_START, **BRIEFLY)
unique_to_the_end = locked("unique_to_the_end", **UNTIL_END, **BRIEFLY)
unique_to_a_fixed_end = locked(
    "unique_to_a_fixed_end",
    lock_key="fixed:<key>",
    lock_expire=LONG,
    lock_unique_for=2 * BRIEF,
    **UNTIL_END,
)
unique_and_limited = locked("unique_and_limited", do_little, rate_limit="1/h", **UNTIL_END)
# The task goes on in another execution.
retry_until_open = locked(
    "retry_until_open",
    retry_until_the_gate_is_open,
    lock_hold_on_retry=True,
    max_retries=None,
    **BOUND,
)
