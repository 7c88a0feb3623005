"""A program that takes and releases a lock over and over, while a signal handler raises.

    python -m tests.faults.interrupted URL MODE STRIKES SEED

The handler raises at a random instant of each round, as a soft time limit does.  After the round
the lock must be free, or become free within its timeout; the thread must be able to take it; and
nothing may be watched.  Prints what came of the rounds as JSON.
"""

import json
import logging
import random
import signal
import sys
import time
from collections import Counter

from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded

from celery_dislock import Dislock, SingletonTask
from celery_dislock.exceptions import DislockError
from tests.pace import LEASE

KEY = "interrupted"
TIMEOUT = LEASE
SLACK = 30.0  # seconds; far beyond what an idle machine needs


def rounds(dislock, app):
    """Return what is interrupted, by its name."""
    kept = dislock.lock(KEY)

    def acquire_and_release():
        if kept.acquire():
            try:
                pass
            finally:
                kept.release()

    def try_acquire():
        if kept.try_acquire():
            try:
                pass
            finally:
                kept.release()

    def block():
        with dislock.lock(KEY):
            pass

    def kept_block():
        with kept:
            pass

    def nested_block():
        with dislock.lock(KEY), kept:
            pass

    @app.task(base=SingletonTask, lock_key=KEY, shared=False)
    def task():
        """Nothing: the guard around it is what is interrupted."""

    return {
        "acquire": acquire_and_release,
        "try": try_acquire,
        "with": block,
        "kept": kept_block,
        "nested": nested_block,
        "guard": lambda: task.apply().get(),
    }


def main(url, mode, strikes, seed):
    """Go on until *strikes* rounds were interrupted, and count what came of all of them."""
    logging.disable(logging.WARNING)
    random.seed(seed)
    app = Celery("interrupted", broker=url, set_as_current=False)
    app.conf.update(dislock_url=url, dislock_watchdog_timeout=TIMEOUT)
    dislock = Dislock(app)
    call = rounds(dislock, app)[mode]
    process = dislock.runtime.process

    def strike(*_args):
        if armed:  # else the signal came late, perhaps by way of another thread
            raise SoftTimeLimitExceeded

    armed = False
    signal.signal(signal.SIGALRM, strike)
    call()
    began = time.perf_counter()
    for _ in range(100):
        call()
    lasts = (time.perf_counter() - began) / 100

    seen = Counter()
    while seen["struck"] < strikes:
        try:
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, lasts * 1.3))
                call()
                seen["not struck"] += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                armed = False
        except SoftTimeLimitExceeded:
            seen["struck"] += 1
        except DislockError as exc:
            seen[f"raised {type(exc).__name__}"] += 1
        check(dislock, process, seen)
    return seen


def check(dislock, process, seen):
    """Find what the round has left behind."""
    lock = dislock.lock(KEY)
    if lock.lease is not None:  # struck before the first instruction of release(): held as before
        seen["held as before"] += 1
        lock.release()
    if len(process.watchdog):
        seen["WATCHED"] += 1
    asked_at = time.monotonic()
    if not lock.try_acquire():
        seen["left for a while"] += 1
        while not lock.try_acquire():
            if time.monotonic() > asked_at + TIMEOUT + SLACK:
                seen["BARRED"] += 1
                return
            time.sleep(0.01)
    lock.release()


if __name__ == "__main__":
    counted = main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    sys.stdout.write(json.dumps(counted))
