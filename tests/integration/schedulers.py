"""Where the beats of a test keep their schedule: nowhere, in a file, in a table, in RedBeat."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from celery import current_app
from celery.beat import PersistentScheduler, Scheduler

from tests.integration.lua_server import START

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from celery import Celery

KINDS = ("memory", "file", "django-celery-beat", "RedBeat")


class Memory:
    """Celery's scheduler, whose beats begin anew."""

    scheduler: Any = Scheduler

    def prepare(self, app: Celery) -> dict[str, Any]:
        """Return further arguments of the scheduler of a beat that starts."""
        del app
        return {}

    def moved(self, now: float) -> None:
        """Take note that it is later."""


class File(Memory):
    """Celery's scheduler, whose beats have a file each."""

    scheduler = PersistentScheduler

    def __init__(self, folder: Path) -> None:
        self._folder, self._files = folder, 0

    def prepare(self, app: Celery) -> dict[str, Any]:
        del app
        self._files += 1
        return {"schedule_filename": str(self._folder / f"schedule{self._files}")}


class Table(Memory):
    """django-celery-beat's scheduler: beats have one database, and it asks for the time itself."""

    def __init__(self, clock: Any) -> None:
        from django_celery_beat.schedulers import DatabaseScheduler

        self.scheduler, self._clock = DatabaseScheduler, clock

    def prepare(self, app: Celery) -> dict[str, Any]:
        entries, app.conf.beat_schedule = app.conf.beat_schedule, {}
        for name, one in entries.items():
            if not self.scheduler.Model.objects.filter(name=name).exists():
                self.scheduler.Entry.from_entry(name, app=app, **one)
        return {}

    def moved(self, now: float) -> None:
        self._clock.move_to(now)

    def row(self, name: str) -> Any:
        """Return an entry as it is in the table."""
        return self.scheduler.Model.objects.get(name=name)


class RedBeat(Memory):
    """RedBeat's scheduler, whose beats have one Redis."""

    def __init__(self) -> None:
        from fakeredis import FakeRedis
        from redbeat import RedBeatScheduler

        self.scheduler, self.client = RedBeatScheduler, FakeRedis(decode_responses=True)

    def prepare(self, app: Celery) -> dict[str, Any]:
        app.conf.update(redbeat_redis_url="redis://nowhere", redbeat_redis_options={})
        app.redbeat_redis = self.client
        return {}


@contextmanager
def schedules_in(kind: str, folder: Path) -> Iterator[Memory]:
    """Let beats keep their schedule in one of ``KINDS``."""
    if kind == "django-celery-beat":
        pytest.importorskip("django_celery_beat")
        with database() as clock:
            yield Table(clock)
    elif kind == "RedBeat":
        pytest.importorskip("redbeat")
        yield RedBeat()
    else:
        yield File(folder) if kind == "file" else Memory()


@contextmanager
def database() -> Iterator[Any]:
    """Make an empty database of Django, and a clock; a beat may die at each of its statements."""
    import django
    import time_machine
    from django.conf import settings
    from django.core.management import call_command
    from django.db import connection, connections
    from django.test import override_settings

    if not settings.configured:
        # Tests that override it set TZ to this when they end.  Django's own is west of UTC, where
        # Celery 5.5 takes 6 hours before UTC for 18 hours after it, if enable_utc is False.
        settings.configure(TIME_ZONE="UTC")
    django.setup()
    in_memory = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
    connections.settings = connections.configure_settings(in_memory)
    apps = ["django.contrib.contenttypes", "django_celery_beat"]
    with (
        override_settings(INSTALLED_APPS=apps, USE_TZ=True, TIME_ZONE="UTC"),
        time_machine.travel(START, tick=False) as clock,
    ):
        call_command("migrate", verbosity=0)
        call_command("flush", verbosity=0, interactive=False)
        with connection.execute_wrapper(statement):
            yield clock


def statement(execute: Any, *arguments: Any) -> Any:
    """Run a statement for the beat that runs."""
    beat = getattr(current_app, "beat", None)
    if beat is None:
        return execute(*arguments)
    return beat.command(execute, *arguments)
