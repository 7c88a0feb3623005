"""What one process knows of an app's locks."""

from __future__ import annotations

import json

from celery_dislock.config.options import TaskOptions
from celery_dislock.locks.runtime import Runtime
from celery_dislock.operating.about import about, differing


def decide(_task, _conflict):
    return None


def test_the_options_that_differ_from_the_defaults_are_told():
    """Others are left out; JSON has no tuples and no functions."""
    options = TaskOptions(
        lock_key=("a", "b"), lock_watchdog_timeout=60.0, lock_limit=1, lock_on_conflict=decide
    )
    assert differing(options) == {
        "lock_key": ["a", "b"],
        "lock_watchdog_timeout": 60.0,
        "lock_on_conflict": f"{__name__}.decide",
    }


def test_two_processes_describe_a_callable_alike():
    """Its repr has an address, which would differ."""
    told = differing(TaskOptions(lock_key=lambda n: f"k{n}"))
    assert "0x" not in json.dumps(told)


def test_no_password_is_told():
    """The URL is shown as in messages."""
    runtime = Runtime(lambda: {"dislock_url": "redis://:s3cret@h/0", "dislock_prefix": "x"})
    told = about(runtime, {"t": TaskOptions(lock_key="k")})
    assert (told["server"], told["prefix"]) == ("redis://:***@h/0", "x")
    assert told["tasks"] == {"t": {"lock_key": "k"}}
    assert "s3cret" not in json.dumps(told)


def test_without_a_lock_server_it_says_why():
    """A worker of another app must be able to answer."""
    told = about(Runtime(lambda: {"dislock_url": "http://x"}), {})
    assert told["server"] is None
    assert "give the lock server's URL" in told["no_server"]
