"""What a worker warns of when it starts, each with its remedy."""

import logging
from types import SimpleNamespace

import pytest
from celery import Task
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


COMES_BACK = {"task_reject_on_worker_lost": True}
TWO_HOURS = {"broker_transport_options": {"visibility_timeout": 7200}}


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
        ({"lock_crash_limit": 3}, COMES_BACK, "and fail the first time"),
        ({"lock_crash_limit": 3, **LATE, "time_limit": 60}, {}, "and fail the first time"),
        # The defaults fit, as do a time limit, an early acknowledgement and another broker.
        ({"lock_on_conflict": "skip"}, {}, None),
        ({"lock_on_conflict": "skip", "lock_unique_until": "end"}, {}, None),
        ({"lock_on_conflict": "skip", "lock_limit": None, "lock_key": "k", **UNIQUE}, {}, None),
        ({"lock_on_conflict": "reject", **LATE}, {}, None),
        ({"lock_on_conflict": "reject"}, {"task_acks_late": True}, None),
        ({**LATE, "time_limit": 60, "max_renew_times": 0}, {}, None),
        ({"max_renew_times": 0}, {}, None),
        ({**LATE, "lock_crash_limit": 3, "time_limit": 60}, COMES_BACK, None),
        ({}, {"dislock_crash_limit": 3}, None),
        ({**LATE, "max_renew_times": 0}, {"broker_url": "amqp://"}, None),
        ({**LATE, "time_limit": 7200}, TWO_HOURS, None),
    ],
)
def test_options_that_do_not_work_as_intended(app, options, conf, words):
    """A message is missed, is acknowledged too early, is delivered again or never comes back."""
    app.conf.update({"dislock_url": "redis://", **conf})
    declare(app, name="shop.export", **options)
    found = warnings(app)
    assert len(found) == (words is not None)
    assert all(words in one and "shop.export" in one for one in found)


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


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"maxmemory_policy": "volatile-lru", "maxmemory": "1000000"}, ["lru", "noeviction"]),
        ({"role": "slave"}, ["replica", "Give the master's URL"]),
        ({}, ["INFO", "+info"]),
        # Without a bound on memory nothing is evicted.
        ({"role": "master"}, []),
        ({"role": "master", "maxmemory_policy": "noeviction", "maxmemory": "1000000"}, []),
        ({"maxmemory_policy": "allkeys-lru", "maxmemory": "0"}, []),
    ],
)
def test_a_server_that_makes_locks_unsafe(info, words):
    """It evicts keys with an expiry, and so locks; takes no lock; or does not say."""
    found = list(about_server(info))
    assert len(found) == bool(words)
    assert all(word in warning for warning in found for word in words)


def test_a_worker_logs_them_once_it_has_started(app, monkeypatch, caplog):
    """The warnings are in the worker's log, not on a terminal that nobody reads."""
    monkeypatch.setattr(Store, "ping", lambda _: {"role": "slave"})
    declare(app, name="shop.export", base=Task, acks_late=True, time_limit=9999)
    step = LockStep(SimpleNamespace(app=app, pool_cls=TaskPool, hostname="w1@here"), dislock=True)
    with caplog.at_level(logging.WARNING, "celery_dislock"):
        step.start(None)
    assert ["replica" in caplog.text, "shop.export" in caplog.text] == [True, True]
