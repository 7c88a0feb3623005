"""What docs/migrating.md says of beats: the same with them, and with ours."""

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


class TestBeat:
    """The table for RedBeat."""

    @pytest.mark.parametrize("kind", ["Celery's", "RedBeat's"])
    def test_two_beats_send_one_message(self, app, ours, redis_client, redis_url, kind):
        """Without a lock of their own; the other sends on when the reservation has ended."""
        if kind == "RedBeat's":
            module = pytest.importorskip("redbeat.schedulers")
            app.conf.redbeat_redis_url = redis_url
            scheduler, entry = module.RedBeatScheduler, module.RedBeatSchedulerEntry
            assert scheduler(app, lazy=True).lock_timeout == 25 * 60  # as long as it waits
        else:
            scheduler, entry = Scheduler, ScheduleEntry
        task = ours(lock_unique_until="expiry", lock_unique_for=1800)
        entry = entry("hourly", task.name, schedule=HOUR, args=(7,), app=app)
        one, other = (scheduler(app, lazy=True) for _ in range(2))
        assert one.apply_async(entry, advance=False).duplicate is False
        assert other.apply_async(entry, advance=False).duplicate is True
        assert messages(redis_client) == 1
        assert expiry_of(redis_client, reservations(redis_client)) == about(1800)
        redis_client.delete(*reservations(redis_client))  # as its expiry does
        assert other.apply_async(entry, advance=False).duplicate is False
