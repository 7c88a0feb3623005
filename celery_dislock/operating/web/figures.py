"""What tasks have done with their locks in the last hour, for the page.

The lock server keeps counters that only grow.  The page notes every few minutes by how much they
have grown, and adds up what it has noted within the hour.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

HOUR = 3600.0  # seconds
EVERY = 300.0  # seconds between two notes
AGAIN = 30.0  # seconds from a note that failed to the next
TASKS_MOST = 200  # that are told, those that did most

# The columns of the page, and the metrics that they add up.  A task that is parked was refused, and
# is told as parked only.
ACQUISITIONS = "celery_dislock_acquisitions_total"
CONFLICTS = "celery_dislock_conflicts_total"
LOST = "celery_dislock_lost_total"
COLUMNS = ("acquired", "refused", "parked", "lost")
PARKED = "queue"  # the outcome of a conflict

Labels = tuple[str, ...]  # task, worker, outcome


class LastHour:
    """
    Adds up what was counted in the last hour.  Thread-safe.

    Args:
        read: Returns the counters by name and labels, of which the first is the task; empty: nobody
            counts.  Blocks.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        read: Callable[[], Mapping[str, Mapping[Labels, float]]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._clock = clock
        self._mutex = threading.Lock()
        self._noted: deque[tuple[float, Counter[tuple[str, str]]]] = deque()
        self._before: Mapping[str, Mapping[Labels, float]] | None = None
        self._began = self._at = 0.0
        self._not_before = float("-inf")

    def note(self) -> None:
        """
        Note by how much the counters have grown, if the last note is some minutes old.

        Raises:
            StoreError: The lock server did not answer.  The next note has what this one lacks.
        """
        with self._mutex:
            now = self._clock()
            is_due = self._before is None or now - self._at >= EVERY
            if is_due and now >= self._not_before:
                self._not_before = now + AGAIN
                self._note(self._read())

    def __call__(self) -> Mapping[str, Any] | None:
        """
        Return the counts of each task, and of how many seconds; None: nobody counts.

        Raises:
            StoreError: The lock server did not answer.
        """
        with self._mutex:
            now = self._read()
            is_first = self._before is None
            if is_first or self._clock() - self._at >= EVERY:
                self._note(now)
            if not now and not any(grown for _, grown in self._noted):
                return None
            total = _grown(self._before or {}, now)
            for _, grown in self._noted:
                total += grown
            seconds = min(HOUR, self._clock() - self._began)
        by_task: Counter[str] = Counter()
        for (task, _), number in total.items():
            by_task[task] += number
        told = [
            {"task": task, **{column: total[task, column] for column in COLUMNS}}
            for task, _ in sorted(by_task.items(), key=lambda one: (-one[1], one[0]))[:TASKS_MOST]
        ]
        return {"tasks": told, "seconds": seconds}

    def _note(self, now: Mapping[str, Mapping[Labels, float]]) -> None:
        if self._before is None:
            self._began = self._clock()
        else:
            self._noted.append((self._clock(), _grown(self._before, now)))
        self._before, self._at = now, self._clock()
        while self._noted and self._clock() - self._noted[0][0] >= HOUR:
            self._noted.popleft()


def _grown(
    before: Mapping[str, Mapping[Labels, float]], now: Mapping[str, Mapping[Labels, float]]
) -> Counter[tuple[str, str]]:
    """Return by how much each task's counters have grown, by task and column."""
    grown: Counter[tuple[str, str]] = Counter()
    for name in (ACQUISITIONS, CONFLICTS, LOST):
        known = before.get(name, {})
        for labels, number in now.get(name, {}).items():
            # A counter that is less than before has begun anew.
            more = number - known.get(labels, 0)
            more = number if more < 0 else more
            if more:
                grown[labels[0], _column(name, labels[-1])] += int(more)
    return grown


def _column(name: str, outcome: str) -> str:
    if name == CONFLICTS:
        return "parked" if outcome == PARKED else "refused"
    return "acquired" if name == ACQUISITIONS else "lost"
