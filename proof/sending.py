"""A process that sends tasks, ``python -m proof.sending``, until its input ends."""

from __future__ import annotations

import random
import sys
import threading
import uuid

from proof.tasking import KEYS, TASKS, app, history, site

PAUSE = 0.05  # seconds between two tasks, on average


def main() -> None:
    """Send one task after the other."""
    chance, stop = random.Random(f"{site.seed}"), threading.Event()

    def wait_for_the_end() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    noted = history()
    while not stop.wait(chance.uniform(0, 2 * PAUSE)):
        name = chance.choice(list(TASKS))
        task_id = str(uuid.uuid4())
        lasts = chance.choice((*[0.0, 0.02] * 8, 2 * site.timeout))
        result = app.tasks[name].apply_async(
            (chance.randrange(KEYS), lasts), task_id=task_id, countdown=0.2 * (name == "debounce")
        )
        noted.add("task", task_id, "duplicate" if result.id != task_id else "sent", name=name)


if __name__ == "__main__":
    main()
