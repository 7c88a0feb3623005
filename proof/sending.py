"""A process that sends tasks, ``python -m proof.sending``, until its input ends."""

from __future__ import annotations

import random
import sys
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any

from celery.signals import before_task_publish
from kombu.exceptions import OperationalError

from celery_dislock.messages.headers import SENT, UNIQUE, notes_in
from proof.operating import operate, probe
from proof.tasking import (
    BURSTS,
    CANCELS,
    COUNTDOWN,
    DIES,
    IN_LINE,
    KEYS,
    MAY_FAIL,
    PARKS,
    RATED,
    TASKS,
    app,
    history,
    site,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

PAUSE = 0.08  # seconds between two tasks, on average
BURST = 4  # tasks that are sent at a time at most
AGAIN = {"max_retries": 3, "interval_start": 0.1, "interval_max": 0.5}


def main() -> None:
    """Send one task after the other."""
    chance, stop = random.Random(f"{site.seed}"), threading.Event()

    def wait_for_the_end() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    operator = threading.Thread(target=operate, args=(random.Random(f"{site.seed}:o"), stop))
    operator.start()
    threading.Thread(target=probe, args=(stop,)).start()
    notes: dict[str, Mapping[str, Any]] = {}  # of each message, by its id

    def look(headers: dict[str, Any], **_: object) -> None:
        notes[headers["id"]] = notes_in(headers)

    before_task_publish.connect(look, weak=False)
    often = (DIES, IN_LINE, RATED, *(BURSTS - CANCELS))
    names = [*TASKS, *(name for name in often if name in TASKS)]  # these more often
    while not stop.wait(chance.uniform(0, 2 * PAUSE)):
        name, number = chance.choice(names), chance.randrange(KEYS)
        least = 2 if name in BURSTS - CANCELS else 1
        for _ in range(chance.randint(least, BURST) if name in BURSTS else 1):
            send(name, number, chance.choice((*["short"] * 28, "long", "keeps the GIL")), notes)


def send(name: str, number: int, how: str, notes: dict[str, Mapping[str, Any]]) -> None:
    """Send a task, and note it."""
    task_id, noted = uuid.uuid4().hex, history()
    about: dict[str, Any] = {
        "name": name,
        "key": f"{name}:{number}",
        "asked": time.monotonic(),
        "parks": name in PARKS,
        "may_fail": name in MAY_FAIL,
        "cancels": name in CANCELS,
    }
    try:
        result = app.tasks[name].apply_async(
            (number, how),
            task_id=task_id,
            countdown=COUNTDOWN.get(name),
            retry_policy=AGAIN,
        )
    except OperationalError as exc:
        about["ahead"] = ahead_of(notes.pop(task_id, {}), about["asked"])
        noted.add("task", task_id, "unknown", error=str(exc), **about)
        return
    kind = "sent" if result.id == task_id else "duplicate"
    # What is sent without a reservation, as in an outage, runs as if there were no others.
    noted_in = notes.pop(task_id, {})
    about["ahead"] = ahead_of(noted_in, about["asked"])
    replaces = UNIQUE in noted_in and TASKS[name].get("lock_on_duplicate") == "replace"
    about["replaces"] = replaces
    noted.add("task", task_id, kind, of=result.id, **about)


def ahead_of(noted: Mapping[str, Any], asked: float) -> float | None:
    """Return by how much the clock that a message was dated by is ahead of this one."""
    return noted[SENT] / 1e6 - asked if SENT in noted else None


if __name__ == "__main__":
    main()
