"""Entries of schedules: their times, copies, and how late a tick may be."""

from datetime import datetime, timezone

import pytest
from celery import Celery
from celery.beat import ScheduleEntry
from celery.schedules import crontab, schedule

from celery_dislock.beat.entries import copy_of, is_over

NOW = datetime(2024, 5, 6, 0, 10, tzinfo=timezone.utc)


@pytest.fixture
def app():
    app = Celery("entries", set_as_current=False)
    app.now = lambda: NOW
    return app


@pytest.mark.parametrize(
    ("deadline", "every", "over"),
    [
        (None, {}, False),
        (600, {}, False),
        (599, {}, True),
        (599, {"minute": "*/5"}, False),
        (0, {"minute": "*/5"}, False),
        (0, {"minute": "*/7"}, True),
    ],
)
@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo"])
def test_how_late_a_tick_of_a_crontab_may_be(app, deadline, every, over, zone):
    """Ten minutes after midnight; as beat_cron_starting_deadline says, to the second."""
    app.conf.update(beat_cron_starting_deadline=deadline, timezone=zone, enable_utc=zone == "UTC")
    hour = {} if every else {"hour": 9 if zone == "Asia/Tokyo" else 0, "minute": 0}
    when = crontab(**hour, **every, app=app)
    assert is_over(ScheduleEntry("daily", "task", schedule=when, app=app), app) is over


def test_other_schedules_have_no_deadline(app):
    """As in Celery.  An entry that is disabled is over whatever its schedule says."""
    app.conf.beat_cron_starting_deadline = 1
    entry = ScheduleEntry("daily", "task", schedule=schedule(86400.0), app=app)
    assert not is_over(entry, app)
    assert is_over(copy_of(entry, enabled=False), app)
