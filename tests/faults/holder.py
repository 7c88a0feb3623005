"""A process that holds locks, to be stopped and killed: ``python -m tests.faults.holder``.

``hold URL KEY TIMEOUT`` takes the lock, prints what becomes of it as JSON lines, and releases it
at the end of the standard input.

``contend URL JOURNAL TIMEOUT KEY...`` takes and releases the locks again and again, and writes into
the journal while one is trusted, until the end of the standard input.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from pathlib import Path

from celery_dislock.locks.attempt import Conflict
from tests.faults.history import Journal
from tests.holding import Holding

STEP = 0.001  # seconds between two looks


def say(what: str, **more: object) -> None:
    """Print one line for the parent."""
    print(json.dumps({"event": what, **more}), flush=True)  # noqa: T201 -- it is a pipe


def input_ends() -> threading.Event:
    """Return an event that is set when the standard input ends, as it does with the parent."""
    ended = threading.Event()

    def wait() -> None:
        os.read(0, 1)
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    return ended


def hold(url: str, key: str, timeout: str) -> None:
    """Take one lock and tell all about it."""
    ended = input_ends()
    with Holding(url) as holding:
        lease = holding.take(key, float(timeout))
        say("acquired", token=lease.token, owner=lease.owner)
        told = 0
        was_held = True
        while not ended.wait(STEP):
            if was_held and not lease.held:
                was_held = False
                say("held no more", why=lease.why_ended)
            for event in holding.events[told:]:
                told += 1
                say(event.name, reason=event.arguments.get("reason"), held=lease.held)
        lease.release()
        for event in holding.events[told:]:
            say(event.name, reason=event.arguments.get("reason"), held=lease.held)


def contend(url: str, journal: str, timeout: str, *keys: str) -> None:
    """Take and release locks until told to stop; the body of each takes a few steps."""
    ended = input_ends()
    record = Journal(Path(journal))
    holder = f"process {os.getpid()}"
    say("ready")
    with Holding(url) as holding:
        while not ended.is_set():
            holding.events.clear()
            lease = holding.try_take(random.choice(keys), float(timeout))
            if isinstance(lease, Conflict):
                time.sleep(random.uniform(0, 4 * STEP))
                continue
            until = time.monotonic() + random.choice((0.0, 0.02, 0.1, 2 * float(timeout)))
            while True:
                now = time.monotonic()  # read before asking: trust now is trust at that instant
                if not lease.held:
                    break
                record.trusted(lease.key, lease.token, holder, now)
                if now >= until or ended.is_set():
                    break
                time.sleep(STEP)
            lease.release()
    record.close()


if __name__ == "__main__":
    {"hold": hold, "contend": contend}[sys.argv[1]](*sys.argv[2:])
