"""What a worker warns of when it starts, each with its remedy."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from celery import Celery, Task
from celery.concurrency.solo import TaskPool

from celery_dislock.hooks import guard_tasks
from celery_dislock.servers.store import Store
from celery_dislock.worker.startup import about_server, about_tasks
from celery_dislock.worker.steps import LockStep
from tests.declaring import declare, does_nothing


@pytest.fixture
def app(plain_app):
    return plain_app


def warnings(app):
    guard_tasks(app)
    return list(about_tasks(app))


UNIQUE = {"lock_unique_until": "start"}
NEWEST = {"lock_unique_until": "end", "lock_on_duplicate": "replace"}
LATE = {"acks_late": True}


@pytest.mark.parametrize(
    ("options", "conf", "words"),
    [
        ({"lock_on_conflict": "skip", **UNIQUE}, {}, "was sent for is missed: shop.export"),
        ({"lock_on_conflict": "skip", **NEWEST}, {}, "was sent for is missed: shop.export"),
        ({"lock_on_conflict": "reject"}, {}, "never dead-lettered: shop.export"),
        ({**LATE, "time_limit": 3601}, {}, "visibility_timeout of 3600 s"),
        (LATE, {"task_time_limit": 7200}, "visibility_timeout of 3600 s"),
        ({**LATE, "max_renew_times": 361}, {}, "visibility_timeout of 3600 s"),
        ({**LATE, "max_renew_times": 0}, {}, "visibility_timeout of 3600 s"),
        ({**LATE, "lock_expire": 4000}, {}, "visibility_timeout of 3600 s"),
        (LATE, {"broker_transport_options": {"visibility_timeout": 60}}, "timeout of 60 s"),
        ({"lock_crash_limit": 3}, {"task_reject_on_worker_lost": True}, "and fail the first time"),
        ({"lock_crash_limit": 3, **LATE, "time_limit": 60}, {}, "and fail the first time"),
    ],
)
def test_options_that_do_not_work_as_intended(app, options, conf, words):
    """A message is missed, is acknowledged too early, is delivered again or never comes back."""
    app.conf.update(conf)
    declare(app, name="shop.export", **options)
    (warning,) = warnings(app)
    assert words in warning
    assert "shop.export" in warning


@pytest.mark.parametrize(
    ("options", "conf"),
    [
        ({"lock_on_conflict": "skip"}, {}),
        ({"lock_on_conflict": "skip", "lock_unique_until": "end"}, {}),
        ({"lock_on_conflict": "skip", "lock_limit": None, "lock_key": "k", **UNIQUE}, {}),
        ({"lock_on_conflict": "reject", **LATE}, {}),
        ({"lock_on_conflict": "reject"}, {"task_acks_late": True}),
        ({**LATE, "time_limit": 60, "max_renew_times": 0}, {}),
        ({"max_renew_times": 0}, {}),
        (
            {**LATE, "lock_crash_limit": 3, "time_limit": 60},
            {"task_reject_on_worker_lost": True},
        ),
        ({}, {"dislock_crash_limit": 3}),
        ({**LATE, "max_renew_times": 0}, {"broker_url": "amqp://"}),
        ({**LATE, "time_limit": 7200}, {"broker_transport_options": {"visibility_timeout": 7200}}),
    ],
)
def test_options_that_work(options, conf):
    """The defaults fit, as do a time limit, an early acknowledgement and another broker."""
    app = Celery("shop", broker="redis://", set_as_current=False)
    app.conf.update({"dislock_url": "redis://", **conf})
    declare(app, name="shop.export", **options)
    assert warnings(app) == []


def test_a_key_alone_does_not_lock_without_the_flag(app):
    """A lock_key on another base class is silently nothing, so the worker says it."""
    for number in range(8):
        declare(app, name=f"shop.task{number}", base=Task)
    declare(app, name="shop.a")
    (warning,) = about_tasks(app)
    assert "shop.task4 and 3 others" in warning
    assert "shop.a" not in warning
    assert "--dislock" in warning


@pytest.mark.parametrize(
    "options",
    [{}, {"lock_key": False}, {"lock_expiry": 60, "unique_on": None}],  # of celery-singleton
)
def test_no_lock_wanted_no_warning(app, options):
    """Such tasks are as they are meant."""
    app.task(does_nothing, name="shop.export", **options)
    assert list(about_tasks(app)) == []


class TestServer:
    @pytest.mark.parametrize(
        ("info", "words"),
        [
            ({"maxmemory_policy": "volatile-lru", "maxmemory": "1000000"}, ["lru", "noeviction"]),
            ({"role": "slave"}, ["replica", "Give the master's URL"]),
            ({}, ["INFO", "+info"]),
        ],
    )
    def test_one_that_makes_locks_unsafe(self, info, words):
        """It evicts keys with an expiry, and so locks; takes no lock; or does not say."""
        (warning,) = about_server(info)
        assert all(word in warning for word in words)

    @pytest.mark.parametrize(
        "info",
        [
            {"role": "master"},
            {"role": "master", "maxmemory_policy": "noeviction", "maxmemory": "1000000"},
            {"maxmemory_policy": "allkeys-lru", "maxmemory": "0"},
        ],
    )
    def test_a_sound_one(self, info):
        """Without a bound on memory nothing is evicted."""
        assert list(about_server(info)) == []


def test_a_worker_logs_them_once_it_has_started(app, monkeypatch, caplog):
    """The warnings are in the worker's log, not on a terminal that nobody reads."""
    monkeypatch.setattr(Store, "ping", lambda _: {"role": "slave"})
    declare(app, name="shop.export", base=Task, acks_late=True, time_limit=9999)
    step = LockStep(SimpleNamespace(app=app, pool_cls=TaskPool, hostname="w1@here"), dislock=True)
    with caplog.at_level(logging.WARNING, "celery_dislock"):
        step.start(None)
    assert ["replica" in caplog.text, "shop.export" in caplog.text] == [True, True]
