"""Sends a unique task from a fresh process, in which nothing was used before.

Its arguments are the URL of the broker, "plugin" or "plain", and how the task is sent.  Prints a
JSON list: for each result its id, and whether it is a duplicate.
"""

from __future__ import annotations

import json
import sys
import threading
from datetime import timedelta
from typing import Any

from celery import Celery
from celery.beat import Scheduler

from celery_dislock import Dislock, SingletonTask

THREADS = 8

app = Celery("fresh", set_as_current=False)


@app.task(
    name="fresh.edit",
    base=SingletonTask,
    lock_key="edit:<doc>",
    lock_unique_until="start",
    shared=False,
)
def edit(doc: int) -> None: ...


def from_threads() -> list[Any]:
    """Send from many threads at once."""
    results, start = [], threading.Barrier(THREADS)

    def send() -> None:
        start.wait()
        results.append(edit.delay(1))

    threads = [threading.Thread(target=send) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def by_beat() -> list[Any]:
    """Send as beat does whose entry is due twice."""
    app.conf.beat_schedule = {
        "edit": {"task": "fresh.edit", "schedule": timedelta(seconds=1), "args": (1,)}
    }
    scheduler = Scheduler(app=app, lazy=True)
    scheduler.setup_schedule()
    entry = scheduler.schedule["edit"]
    return [scheduler.apply_async(entry, advance=False) for _ in range(2)]


WAYS = {
    "threads": from_threads,
    "delay": lambda: [edit.delay(1) for _ in range(2)],
    "by name": lambda: [app.send_task("fresh.edit", (1,)) for _ in range(2)],
    "beat": by_beat,
}


def main(url: str, plugin: str, way: str) -> list[tuple[str, bool | None]]:
    app.conf.broker_url = url
    if plugin == "plugin":
        Dislock(app)
    return [(result.id, getattr(result, "duplicate", None)) for result in WAYS[way]()]


if __name__ == "__main__":
    json.dump(main(*sys.argv[1:]), sys.stdout)
