"""An operator, who pauses locks and gives them other limits."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from celery_dislock.exceptions import DislockError
from celery_dislock.operating.locks import AppLocks
from proof.tasking import KEYS, TASKS, app, history, site

if TYPE_CHECKING:
    import random
    import threading

LASTS = 3.0  # seconds until a limit ends by itself, if its operator is killed
MARGIN = 0.1  # seconds by which two clocks of this machine may differ


def operate(chance: random.Random, stop: threading.Event) -> None:
    """Set one limit after the other, until it is told to stop."""
    locks, noted = AppLocks(app), history()
    keys = [f"{name}:{number}" for name in TASKS for number in range(KEYS)]
    keys += ["mutex:0", *["semaphore:0"] * site.has_lines]
    while not stop.wait(chance.uniform(0.5, 3.0)):
        key, limit = chance.choice(keys), chance.randrange(2)
        (lock,) = locks.runtime.lock_names([key])
        try:
            asked = time.monotonic()
            locks.actions.limit(lock, limit, seconds=LASTS)
            at, until = time.monotonic() + MARGIN, asked + LASTS - MARGIN
            stop.wait(chance.uniform(0.2, 2.0))
            until = min(until, time.monotonic() - MARGIN)
            noted.add("limit", key, "set", at=at, limit=limit, until=until)
            locks.actions.limit(lock, None)
        except DislockError:
            stop.wait(LASTS)
