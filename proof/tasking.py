"""The app of the workers: a task of each strategy, which notes what it does."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from celery import Celery
from celery.signals import task_postrun

from celery_dislock import Dislock, Key, SingletonTask
from celery_dislock.config.terms import Rate
from celery_dislock.exceptions import SupersededError
from proof.history import History
from proof.holding import Holding
from proof.site import Site

KEYS = 2  # of each task
ONE_NEWER = {
    "lock_on_conflict": "queue",
    "lock_queue_limit": 1,
    "lock_queue_overflow": "replace",
}
PAIR = {
    "lock_key": ["pair:<number>", lambda number, how: f"pair:{(number + 1) % KEYS}"]  # noqa: ARG005
}
LATER = {"lock_retry_for": 6 * 3600}  # its end goes by the workers' clocks, which are set
UNIQUE = {"lock_on_conflict": "queue", "lock_unique_until": "start"}
REPLACES = {"lock_on_duplicate": "replace"}
AT_LEAST = {"lock_at_least_for": 0.7}  # seconds: less than a timeout, so that no kill excuses less
WIDE, WIDE_LIMIT = "wide", 2  # a key of all tasks of two keys in line: fewer than the narrow admit
IN_LINE, RATED = "two in line", "rated"
TAKES_OVER, STUBBORN = "takes over", "takes over the stubborn"
DIES = "dies"  # in its body, now and then; what it holds must not stay for its timeout
DIES_TIMEOUT = 8.0  # seconds

RATE = "4/4s"


def rate_of(number: int, how: str) -> str:  # noqa: ARG001 -- of the call
    """Tell the rate of a call."""
    return RATE


def cost_of(number: int, how: str) -> int:  # noqa: ARG001 -- of the call
    """Tell what a call costs."""
    return 1 + len(how) % 2


# By name, the options of each task.
ALL_TASKS: dict[str, dict[str, Any]] = {
    "skip": {"lock_on_conflict": "skip"},
    "raise": {"lock_on_conflict": "raise"},
    "reject": {"lock_on_conflict": "reject"},
    "retry": {"lock_on_conflict": "retry", **LATER},
    "wait": {"lock_on_conflict": "wait", "lock_wait_timeout": 600},
    "queue": {"lock_on_conflict": "queue"},
    "three": {"lock_on_conflict": "queue", "lock_limit": 3},
    "newest": ONE_NEWER,
    TAKES_OVER: {"lock_on_conflict": "cancel"},
    STUBBORN: {"lock_on_conflict": "cancel", "lock_cancel_after": 0.4},
    "unique": UNIQUE,
    "debounce": {**UNIQUE, **REPLACES},
    "latest": {**UNIQUE, **REPLACES, "lock_unique_until": "end"},
    "at least": {"lock_on_conflict": "queue", **AT_LEAST},
    "at least or wait": {"lock_on_conflict": "wait", "lock_wait_timeout": 600, **AT_LEAST},
    "capped": {"lock_on_conflict": "retry", **LATER, "max_renew_times": 3},
    DIES: {"lock_on_conflict": "skip", "lock_watchdog_timeout": DIES_TIMEOUT},
    "reads": {"lock_key": "book:<number>", "lock_on_conflict": "queue", "lock_mode": "shared"},
    "writes": {"lock_key": "book:<number>", "lock_on_conflict": "queue"},
    IN_LINE: {
        "lock_key": [Key(WIDE, limit=WIDE_LIMIT), f"{IN_LINE}:<number>"],
        "lock_on_conflict": "queue",
        "lock_limit": 2,
    },
    RATED: {
        "lock_on_conflict": "queue",
        "lock_rate": rate_of,
        "lock_cost": cost_of,
        "lock_limit": 3,
    },
    "two or skip": {**PAIR, "lock_on_conflict": "skip"},
    "two or retry": {**PAIR, "lock_on_conflict": "retry", **LATER},
    "two or wait": {**PAIR, "lock_on_conflict": "wait", "lock_wait_timeout": 600},
}
CANCELS = {TAKES_OVER, STUBBORN}
PARKS = {name for name, options in ALL_TASKS.items() if options["lock_on_conflict"] == "queue"}
PARKS |= CANCELS
MAY_FAIL = {"raise", "reject"}
COUNTDOWN = {"debounce": 0.2}  # seconds
BURSTS = {"debounce", "latest", *CANCELS}  # several are sent at a time, to replace each other
DEATHS = 1 / 2  # of the bodies that may die
RUNAWAY = 8  # timeouts: a body that goes on beyond its cap
LASTS = (0.05, 1.0, 3.0)  # timeouts: bodies that may be told to end
SLOW, RESISTS = 0.3, 3.0  # timeouts for which they go on then, if they do
RETRIES, AGAIN = 1 / 3, 0.5  # of those that were not told; timeouts until they come again

site = Site.of_this_process()
app = Celery("proof", broker=site.broker, backend=site.results, set_as_current=False)
app.conf.update(
    broker_connection_max_retries=None,
    broker_connection_retry_on_startup=True,
    broker_connection_timeout=2.0,
    broker_transport_options={"confirm_publish": True},  # what was sent has arrived
    dislock_url=site.url,
    dislock_transport_options=site.options,
    dislock_watchdog_timeout=site.timeout,
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=1,
)
dislock = Dislock(app)
_histories: dict[int, History] = {}  # by process id: children of a pool are forked


def history() -> History:
    """Return the history of this process."""
    pid = os.getpid()
    if pid not in _histories:
        _histories[pid] = History(Path(site.folder, "history"))
    return _histories[pid]


def body(task: Any, number: int, how: str) -> None:
    """Hold the lock for a while."""
    mine = history()
    mine.add("task", task.request.id, "begin", since=task.lease.since)
    options = TASKS[task.name]
    terms = {
        "limit": options.get("lock_limit", 1),
        "limits": {WIDE: WIDE_LIMIT},
        "rate": Rate.of(RATE) if task.name == RATED else None,
        "cost": cost_of(number, how) if task.name == RATED else 1,
        "mode": options.get("lock_mode", "exclusive"),
        "timeout": options.get("lock_watchdog_timeout", site.timeout),
        "at_least": options.get("lock_at_least_for", 0.0),
        "cap": options.get("max_renew_times", 0),
    }
    # When this attempt asked for its lock is not known to the body; the lease knows.
    holding = Holding(mine, task.lease, task.lease.since, **terms)
    if how == "keeps the GIL":
        ctypes.PyDLL(None).usleep(int(2e6 * site.timeout))
    if task.name == "capped" and random.random() < 1 / 2:
        how = "runaway"
    if task.name in CANCELS:
        work_until_told(task, holding)
        return
    holding.trust({"long": 2, "runaway": RUNAWAY}.get(how, 0.05) * site.timeout)
    if task.name == DIES and random.random() < DEATHS:
        mine.add("process", str(os.getpid()), "killed", by="itself")
        os.kill(os.getpid(), signal.SIGKILL)
    holding.end()
    mine.add("task", task.request.id, "end")


def work_until_told(task: Any, holding: Holding) -> None:
    """Work until a newer task is there; end then: at once, later, or when nothing else helps."""
    mine, timeout = history(), site.timeout
    try:
        holding.trust(random.choice(LASTS) * timeout)
    except SupersededError as exc:
        mine.add("task", task.request.id, "told", by=exc.by)
        if task.name == STUBBORN:
            resist(holding, RESISTS * timeout, dies=random.random() < DEATHS)
        else:
            holding.trust(random.choice((0.0, 0.0, SLOW)) * timeout)
        holding.end()
        raise
    holding.end()
    if not task.request.retries and random.random() < RETRIES:
        mine.add("task", task.request.id, "retries")
        raise task.retry(countdown=AGAIN * timeout)
    mine.add("task", task.request.id, "end")


def resist(holding: Holding, seconds: float, *, dies: bool) -> None:
    """Go on whatever is raised, or until what an ``except Exception`` does not catch."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            holding.trust(seconds)
        except BaseException:
            if not dies:
                raise


def over(task_id: str, **_: object) -> None:
    """Note that an execution is over, whether or not its body has begun."""
    history().add("task", task_id, "over")


task_postrun.connect(over)
TASKS = {
    name: {"lock_key": f"{name}:<number>", **options}
    for name, options in ALL_TASKS.items()
    if site.has_lines or name not in PARKS
    if name != IN_LINE or not str(site.url).startswith("redis+cluster:")  # refused there
}
for _name, _options in TASKS.items():
    app.task(body, name=_name, base=SingletonTask, bind=True, **_options)
