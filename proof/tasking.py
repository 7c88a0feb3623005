"""The app of the workers: a task of each strategy, which notes what it does."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from celery import Celery

from celery_dislock import Dislock, SingletonTask
from proof.history import History
from proof.holding import Holding
from proof.site import Site

KEYS = 3  # of each task
REDELIVERED_AFTER = 10  # seconds until the broker delivers again what a dead worker had

# By name, the options of each task.
TASKS: dict[str, dict[str, Any]] = {
    "skip": {"lock_on_conflict": "skip"},
    "retry": {"lock_on_conflict": "retry", "lock_retry_for": 3600},
    "wait": {"lock_on_conflict": "wait", "lock_wait_timeout": 600},
    "queue": {"lock_on_conflict": "queue"},
    "newest": {
        "lock_on_conflict": "queue",
        "lock_queue_limit": 1,
        "lock_queue_overflow": "replace",
    },
    "unique": {"lock_on_conflict": "queue", "lock_unique_until": "start"},
    "debounce": {
        "lock_on_conflict": "queue",
        "lock_unique_until": "start",
        "lock_on_duplicate": "replace",
    },
}

site = Site.of_this_process()
app = Celery("proof", broker=site.broker, backend=site.broker, set_as_current=False)
app.conf.update(
    broker_transport_options={"visibility_timeout": REDELIVERED_AFTER},
    broker_connection_retry_on_startup=True,
    dislock_url=site.url,
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


def body(task: Any, number: int, lasts: float) -> None:
    """Hold the lock for a while."""
    mine = history()
    mine.add("task", task.request.id, "begin", name=task.name)
    # When this attempt asked for its lock is not known to the body; the lease knows.
    asked = task.lease.acquired_at + time.monotonic() - time.time()
    key = f"{task.name}:{number}"
    holding = Holding(mine, task.lease, asked, key=key, timeout=site.timeout)
    holding.trust(lasts)
    holding.end()
    mine.add("task", task.request.id, "end")


for _name, _options in TASKS.items():
    app.task(
        body, name=_name, base=SingletonTask, bind=True, lock_key=f"{_name}:<number>", **_options
    )
