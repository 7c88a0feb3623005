"""What docs/migrating.md says of locks by hand and of beats: the same with them, and with ours."""

from __future__ import annotations

import pytest
from celery.beat import ScheduleEntry, Scheduler

from tests.docs.migrating.libraries import (
    HOUR,
    LIBRARIES_WARN,
    about,
    expiry_of,
    messages,
    reservations,
)

pytestmark = LIBRARIES_WARN


class TestByHand:
    """The table for SET NX."""

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

    def test_two_beats_send_one_message(self, app, entry, redis_client):
        """Without a lock of their own; the other sends on when the reservation has ended."""
        one, other = (Scheduler(app, lazy=True) for _ in range(2))
        assert one.apply_async(entry, advance=False).duplicate is False
        assert other.apply_async(entry, advance=False).duplicate is True
        assert messages(redis_client) == 1
        assert expiry_of(redis_client, reservations(redis_client)) == about(1800)
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
