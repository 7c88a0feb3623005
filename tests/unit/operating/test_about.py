"""What one process knows of an app's locks; the rest is tested with ``inspect``."""

from __future__ import annotations

from celery_dislock.config.options import TaskOptions
from celery_dislock.operating.about import differing


def decide(_task, _conflict):
    return None


def test_the_options_that_differ_from_the_defaults_are_told():
    """Others are left out; JSON has no tuples and no functions, whose repr has an address."""
    options = TaskOptions(
        lock_key=("a", "b"), lock_watchdog_timeout=60.0, lock_limit=1, lock_on_conflict=decide
    )
    assert differing(options) == {
        "lock_key": ["a", "b"],
        "lock_watchdog_timeout": 60.0,
        "lock_on_conflict": f"{__name__}.decide",
    }
