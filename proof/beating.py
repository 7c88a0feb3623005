"""The app of the beats, of which one sends: each message says who sent which tick, and when.

The messages go to the Redis that has the results, where nothing goes wrong.  So what is missing or
twice is the beats' doing.
"""

from __future__ import annotations

import math
import os
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from celery import Celery
from celery.beat import PersistentScheduler
from celery.schedules import BaseSchedule

from celery_dislock.beat import with_lock
from proof.history import History
from proof.site import TICKS, Site

ROUND = 0.5  # seconds: a beat looks at its schedule at least once in each
NOTED = 0.1  # seconds between two rounds that are noted: Celery makes hundreds before each tick
EVERY = {"often": 1.0, "seldom": 5.0, "on the dot": 2.0}  # seconds between two ticks
BY_WALL = {"on the dot"}  # due at multiples of these seconds, as a crontab is at those of minutes


class OnTheDot(BaseSchedule):  # type: ignore[misc]  # noqa: PLW1641 -- nor has its ancestor
    """Due at each multiple of some seconds, by the wall clock: a crontab of seconds."""

    def __init__(self, every: float, **more: Any) -> None:
        super().__init__(**more)
        self.every = every

    def __reduce__(self) -> Any:
        return type(self), (self.every,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OnTheDot) and other.every == self.every

    def remaining_estimate(self, last_run_at: datetime) -> timedelta:
        """Return the time until it is due."""
        since = self.maybe_make_aware(last_run_at).timestamp()
        due = self.every * (math.floor(since / self.every) + 1)
        return timedelta(seconds=due - self.now().timestamp())

    def is_due(self, last_run_at: datetime) -> tuple[bool, float]:
        """Return whether it is due, and the seconds until it is due again."""
        left = self.remaining_estimate(last_run_at).total_seconds()
        return left <= 0, left if left > 0 else self.remaining_estimate(self.now()).total_seconds()


class Noting(with_lock(PersistentScheduler)):  # type: ignore[misc]
    """Celery's scheduler, which notes that it goes round, and says in each message who sent it."""

    noted = 0.0

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Go round."""
        if time.monotonic() > self.noted + NOTED:
            self.noted = time.monotonic()
            history.add("beat", str(os.getpid()), "goes round")
        return float(super().tick(*args, **kwargs))

    def send_task(self, name: str, *args: Any, **options: Any) -> Any:
        """Send the message of a tick."""
        sent = {
            "at": time.monotonic(),
            "by": str(os.getpid()),
            "entry": name,
            "every": EVERY[name],
            "by_wall": name in BY_WALL,
            "tick": self._claimed_us / 1e6,
            "timeout": site.timeout,
        }
        options["headers"] = {**options.get("headers", {}), "sent": sent}
        return super().send_task(name, *args, **options)


site = Site.of_this_process()
history = History(Path(site.folder, "history"))
app = Celery("beats", broker=site.results, set_as_current=False)
app.conf.update(
    beat_max_loop_interval=ROUND,
    beat_schedule={
        name: {"task": name, "schedule": OnTheDot(every) if name in BY_WALL else every}
        for name, every in EVERY.items()
    },
    beat_scheduler="proof.beating:Noting",
    beat_schedule_filename=f"{site.folder}/schedule-{os.getpid()}",
    dislock_beat_timeout=site.timeout,
    dislock_transport_options=site.options,
    dislock_url=site.url,
    result_expires=None,
    task_default_queue=TICKS,
)
