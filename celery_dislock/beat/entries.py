"""The entries of a schedule, of any scheduler's class: names, times, copies."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from celery.schedules import crontab
from celery.utils.time import maybe_make_aware

if TYPE_CHECKING:
    from celery import Celery

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
MICROSECOND = timedelta(microseconds=1)


def entry_name(entry: Any) -> str:
    """Return an entry's name as text that can be sent: any key of a dict may be one."""
    return str(entry.name).encode(errors="backslashreplace").decode()


def to_us(when: datetime | None) -> int:
    """Return a time of an entry in microseconds since 1970; 0 if it was never sent."""
    return 0 if when is None else (maybe_make_aware(when) - EPOCH) // MICROSECOND


def to_time(us: int, entry: Any) -> datetime:
    """Return what :func:`to_us` was given, in the time zone in which an entry has its times."""
    when, known = EPOCH + us * MICROSECOND, entry.last_run_at
    if known is None:
        return when
    # Celery takes a time without a zone for UTC.
    return when.astimezone(known.tzinfo) if known.tzinfo else when.replace(tzinfo=None)


def copy_of(entry: Any, **changed: Any) -> Any:
    """
    Return a copy of an entry: one that is in the schedule is saved, with all that was changed.

    The module ``copy`` would call its class as Celery's own is called, and without the app.
    """
    made = object.__new__(type(entry))
    made.__dict__ = {**vars(entry), **changed}
    return made


def is_over(entry: Any, app: Celery) -> bool:
    """Return whether the last tick of an entry must not be sent any more; it is not due again."""
    if not getattr(entry, "enabled", True):  # of RedBeat
        return True
    seconds = app.conf.beat_cron_starting_deadline
    if seconds is None or not isinstance(entry.schedule, crontab):
        return False
    since = app.now() - timedelta(seconds=seconds, microseconds=1)
    later = entry.schedule.remaining_estimate(since.astimezone(entry.schedule.tz))
    return bool(later > timedelta(0))
