"""What all locks of one app share in one process."""

from __future__ import annotations

import traceback

import pytest
import redis

from celery_dislock.exceptions import DamagedLockError, SettingsError, StoreError
from celery_dislock.locks.runtime import Runtime
from celery_dislock.parking.process import runtime_of


@pytest.mark.parametrize(
    "conf",
    [
        {"dislock_url": "u:s3cret@a"},
        {"dislock_url": "s3cret@a"},
        {"dislock_url": "redis//:s3cret@a"},
        {"dislock_url": ["redis://a", "s3cret"]},
        {"dislock_url": {"redis://:s3cret@a"}},
        {"dislock_ulr": "redis://:s3cret@a"},
        {"dislock_password": "s3cret"},
        {"dislock_transport_options": "s3cret"},
        {"dislock_transport_options": [("password", "s3cret")]},
        {"dislock_transport_option": {"password": "s3cret"}},
        {
            "dislock_url": "redis://a",
            "dislock_transport_options": {"password": "s3cret", "sokcet_timeout": 1},
        },
        {
            "dislock_url": "redis://a",
            "dislock_transport_options": {"credential_provider": "s3cret"},
        },
        {
            "dislock_url": "redis://a",
            "dislock_transport_options": {"credential_provider": {"password": "s3cret"}},
        },
        {
            "dislock_url": "sentinel://a",
            "dislock_transport_options": {"master_name": "m", "sentinel_kwargs": "s3cret"},
        },
        {
            "dislock_url": "sentinel://a",
            "dislock_transport_options": {
                "master_name": "m",
                "sentinel_kwargs": {"password": "s3cret", "sokcet_timeout": 1},
            },
        },
        {
            "dislock_url": "sentinel://a",
            "dislock_transport_options": {"password": "s3cret"},
        },
    ],
)
def test_no_setting_that_is_refused_shows_a_password(conf):
    """A URL or options in the wrong place, misspelt or of the wrong type, are not shown."""
    with pytest.raises(SettingsError) as raised:
        Runtime(lambda: conf).process  # noqa: B018 -- making it is what fails
    assert "s3cret" not in "".join(traceback.format_exception_only(raised.value))
    assert "s3cret" not in repr(raised.value.args)
    assert raised.value.__cause__ is None or "s3cret" not in str(raised.value.__cause__)


def test_a_process_forgets_what_it_has_told_in_the_end(app, caplog, monkeypatch):
    """However many locks are damaged, what is remembered of them is bounded."""
    monkeypatch.setattr("celery_dislock.locks.runtime.DAMAGED_MOST", 2)
    process = runtime_of(app).process
    for number in (1, 2, 3, 1, 1):
        process.lock_server_failed(DamagedLockError("redis://x", "why", f"dislock:{{{number}}}"))
    assert len(caplog.messages) == 4
    assert len(process._damaged) <= 2


def test_a_server_that_refuses_locks_is_not_back_when_it_tells_who_has_one(app, caplog):
    """One without memory answers what it reads: its outage ends when it gives a free lock again."""
    caplog.set_level("INFO")
    process = runtime_of(app).process
    full = StoreError("redis://x", "used memory > 'maxmemory'")
    full.raw = redis.ResponseError("OOM")
    for _ in range(3):
        process.lock_server_failed(full)
        process.lock_server_answered(took=False)
    process.lock_server_answered()
    said = ["answers again" in line for line in caplog.messages]
    assert said == [False, True]
    process.lock_server_failed(StoreError("redis://x", "connection refused"))
    process.lock_server_answered(took=False)
    assert "answers again" in caplog.messages[-1]


def test_the_prefix_is_part_of_every_name():
    """Two installations on one server keep apart by their prefix."""
    runtime = Runtime(lambda: {"dislock_prefix": "staging"})
    assert runtime.lock_names(["export:7"]) == ("staging:{export:7}",)
