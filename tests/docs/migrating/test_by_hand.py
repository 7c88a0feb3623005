"""What docs/migrating.md says of locks by hand and of beats: the same with them, and with ours."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from celery.beat import ScheduleEntry, Scheduler

from tests.docs.migrating.libraries import (
    HOUR,
    LIBRARIES_WARN,
    about,
    database,
    expiry_of,
    messages,
    reservations,
)

pytestmark = LIBRARIES_WARN


def configure_django() -> None:
    """Give Django its default settings, because other tests look at all objects of this process."""
    settings = pytest.importorskip("django.conf").settings
    if not settings.configured:
        settings.configure()


def cache_in_memory(name: str) -> Any:
    """Make a cache as Django has it by default."""
    locmem = pytest.importorskip("django.core.cache.backends.locmem")
    configure_django()
    return locmem.LocMemCache(name, {})


class TestByHand:
    """The tables for SET NX and for Django's cache."""

    @pytest.fixture
    def task(self, ours):
        """A task that runs a body which it is given, with a lock when it runs only."""

        def declare(body, **options):
            def run(self, corp_id):
                return body()

            options = {"lock_key": "export:<corp_id>", "lock_unique_until": None, **options}
            return ours(run, bind=True, **options)

        return declare

    def test_a_key_by_hand(self, task, dislock, redis_client):
        """One corp at a time, in tasks and elsewhere; a lock by hand is not known here."""
        assert redis_client.set("export:7", "1", nx=True, ex=600)
        exports = task(lambda: "ran")
        with dislock.lock("export:7"):
            assert exports.apply((7,)).state == "IGNORED"
            assert exports.apply((8,)).result == "ran"
        assert exports.apply((7,)).result == "ran"

    def test_a_cache_in_memory_is_of_one_process(self):
        """Django's default cache: two processes take the same lock; ours is on the server."""
        cache = cache_in_memory("")
        program = (
            "from django.core.cache.backends.locmem import LocMemCache;"
            "print(LocMemCache('', {}).add('by-hand:7', '1'))"
        )
        assert cache.add("by-hand:7", "1")
        other = subprocess.run(
            [sys.executable, "-c", program], check=True, capture_output=True, text=True
        )
        assert other.stdout.strip() == "True"

    def test_other_entries_evict_no_lock(self, task, redis_client):
        """A cache in memory keeps 300 entries, and drops others for new ones."""
        cache = cache_in_memory("culls")
        cache.add("by-hand:7", "1", timeout=600)
        for number in range(1000):
            cache.set(f"page:{number}", "...")
        assert cache.add("by-hand:7", "1")

        def body():
            with redis_client.pipeline() as pipe:
                for number in range(1000):
                    pipe.set(f"page:{number}", "...")
                pipe.execute()
            return redis_client.exists("dislock:{export:7}")

        assert task(body).apply((7,)).get() == 1

    def test_a_cache_that_is_cleared(self, task, redis_url, redis_client):
        """clear() of Django's Redis cache empties its database: give the locks another one."""
        redis_cache = pytest.importorskip("django.core.cache.backends.redis")
        configure_django()
        cache = redis_cache.RedisCache(database(redis_url, 1), {})
        cache.add("by-hand:7", "1", timeout=600)

        def body():
            cache.clear()
            return redis_client.exists("dislock:{export:7}")

        assert task(body).apply((7,)).get() == 1
        assert cache.add("by-hand:7", "1")
        cache.close()


class TestBeat:
    """The table for RedBeat."""

    @pytest.fixture
    def redbeat(self, app, redis_url):
        """RedBeat's module, if it is installed."""
        module = pytest.importorskip("redbeat.schedulers")
        app.conf.redbeat_redis_url = redis_url
        return module

    @pytest.fixture
    def entry(self, app, ours):
        """A schedule's entry of a task of ours, of which one message per half hour is sent."""
        task = ours(lock_unique_until="expiry", lock_unique_for=1800)
        return ScheduleEntry("hourly", task.name, schedule=HOUR, args=(7,), app=app)

    def beats(self, app):
        return [Scheduler(app, lazy=True) for _ in range(2)]

    def test_two_beats_send_one_message(self, app, entry, redis_client):
        """Beats without a lock of their own: the second one's message is a duplicate."""
        first, second = [beat.apply_async(entry, advance=False) for beat in self.beats(app)]
        assert (first.duplicate, second.duplicate) == (False, True)
        assert messages(redis_client) == 1
        assert expiry_of(redis_client, reservations(redis_client)) == about(1800)

    def test_a_beat_that_is_killed_holds_up_no_other(self, app, entry, redis_client):
        """The others go on, and send when the reservation has ended."""
        killed, other = self.beats(app)
        killed.apply_async(entry, advance=False)
        redis_client.delete(*reservations(redis_client))  # as its expiry does
        assert other.apply_async(entry, advance=False).duplicate is False

    def test_redbeat_waits_for_the_lock_of_a_dead_beat(self, app, redbeat):
        """For five times the longest pause of a beat."""
        assert redbeat.RedBeatScheduler(app, lazy=True).lock_timeout == 25 * 60

    def test_what_redbeat_sends_is_unique(self, app, redbeat, entry, redis_client):
        """RedBeat sends as any beat does, so its messages are reserved as well."""
        entry = redbeat.RedBeatSchedulerEntry(
            "hourly", entry.task, schedule=entry.schedule, args=(7,), app=app
        )
        beat = redbeat.RedBeatScheduler(app, lazy=True)
        sent = [beat.apply_async(entry, advance=False).duplicate for _ in range(2)]
        assert sent == [False, True]
        assert messages(redis_client) == 1
