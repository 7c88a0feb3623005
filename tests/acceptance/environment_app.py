"""The app of one environment of several on one Redis, kept apart by Celery's ``global_keyprefix``.

The environment has its name and the Redis.  What the tasks report is in another database.
"""

from __future__ import annotations

import os
import time

import redis
from celery import Celery

from celery_dislock import Dislock, SingletonTask


def reports_of(url: str) -> redis.Redis:
    """Return a client of the database with what tasks have reported."""
    return redis.Redis.from_url(f"{url.rpartition('/')[0]}/1", decode_responses=True)


def make(name: str, url: str) -> Celery:
    """Return the app of an environment; *name* is the prefix of its broker."""
    app = Celery(name, broker=url, set_as_current=False)
    Dislock(app)
    app.conf.update(
        broker_transport_options={"global_keyprefix": name},
        dislock_watchdog_timeout=3,
        dislock_beat_timeout=3,
        beat_schedule={"tick": {"task": "tick", "schedule": 0.5}},
        beat_max_loop_interval=0.5,
    )

    def stay(what: str) -> None:
        """Report, and stay until the gate of this environment is open."""
        reports = reports_of(url)
        reports.rpush(f"began {name}", what)
        while not reports.exists(f"gate {name}"):
            time.sleep(0.02)
        reports.close()

    @app.task(
        name="export",
        base=SingletonTask,
        lock_key="export:<key>",
        lock_on_conflict="queue",
        shared=False,
    )
    def export(key: int) -> None:
        stay("export")

    @app.task(
        name="edit",
        base=SingletonTask,
        lock_key="edit:<key>",
        lock_unique_until="end",
        shared=False,
    )
    def edit(key: int) -> None:
        stay("edit")

    @app.task(name="tick", shared=False)
    def tick() -> None:
        reports = reports_of(url)
        reports.incr(f"ticks {name}")
        reports.close()

    return app


if "ENVIRONMENT" in os.environ:
    app = make(os.environ["ENVIRONMENT"], os.environ["ENVIRONMENT_URL"])
