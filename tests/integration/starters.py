"""Takes a lock with a rate in many processes at once, each as often as it is told.

Its arguments are the URL of the lock server, the key, the rate, what a start costs at most (0: it
has no cost), and how many processes there are, and starts of each.  Every other process waits in
line; the others ask again and again.
"""

from __future__ import annotations

import os
import random
import sys
import time

from celery_dislock import Dislock

PAUSE = 0.002  # seconds between two tries of who does not wait in line


def costs_of(process: int, most: int, starts: int) -> list[int | None]:
    """Return what the starts of a process cost."""
    rng = random.Random(process)
    return [rng.randint(1, most) if most else None for _ in range(starts)]


def take(url: str, key: str, rate: str, costs: list[int | None], *, waits: bool) -> None:
    """Take the lock once for each of these costs."""
    with Dislock.from_url(url) as dislock:
        for cost in costs:
            lock = dislock.lock(key, rate=rate, cost=cost)
            if waits:
                with lock:
                    continue
            while not lock.try_acquire():
                time.sleep(PAUSE)
            lock.release()


def main(url: str, key: str, rate: str, most: str, processes: str, starts: str) -> int:
    """Return how many processes have failed."""
    begins, begin = os.pipe()
    children = []
    for nth in range(int(processes)):
        child = os.fork()
        if not child:
            os.close(begin)
            os.read(begins, 1)  # until all are there
            take(url, key, rate, costs_of(nth, int(most), int(starts)), waits=bool(nth % 2))
            os._exit(0)
        children.append(child)
    os.close(begin)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
