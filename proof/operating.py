"""An operator, who pauses locks, gives them other limits, and asks whether they can be had."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from celery_dislock.exceptions import DislockError
from celery_dislock.operating.locks import AppLocks
from proof.holding import name
from proof.tasking import DIES, DIES_TIMEOUT, KEYS, TASKS, WIDE, app, dislock, history, site

if TYPE_CHECKING:
    import random
    import threading

LASTS = 3.0  # seconds until a limit ends by itself, if its operator is killed
ASKED = 0.3  # seconds between two questions
MARGIN = 0.1  # seconds by which two clocks of this machine may differ


def operate(chance: random.Random, stop: threading.Event) -> None:
    """Set one limit after the other, until it is told to stop."""
    locks, noted = AppLocks(app), history()
    keys = [f"{one}:{number}" for one in TASKS for number in range(KEYS) if one != DIES]
    keys += ["mutex:0", *["semaphore:0", WIDE] * site.has_lines]
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


def probe(stop: threading.Event) -> None:
    """Ask again and again whether the locks can be had of tasks whose processes die."""
    noted, number = history(), 0
    while not stop.wait(ASKED):
        number = (number + 1) % KEYS
        key, about = f"{DIES}:{number}", name()
        lock = dislock.lock(key, watchdog_timeout=DIES_TIMEOUT)
        noted.add("probe", about, "invoke", key=key, lasts=DIES_TIMEOUT)
        try:
            taken = lock.acquire(blocking=False)
            noted.add("probe", about, "ok" if taken else "refused")
            if taken:
                lock.release()
                noted.add("probe", about, "freed")
        except DislockError as exc:
            noted.add("probe", about, "unknown", error=str(exc))
