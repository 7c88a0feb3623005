"""What a worker warns of when it starts, each with its remedy."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from celery import Celery

from celery_dislock import SingletonTask
from celery_dislock.hooks import guard_tasks
from celery_dislock.servers.store import Store
from celery_dislock.worker.startup import about_server, about_tasks
from celery_dislock.worker.steps import LockStep
from tests.unit.fakes import without_strangers


@pytest.fixture
def app(plain_app):
    return without_strangers(plain_app)


def declare(app, name, **options):
    @app.task(name=name, shared=False, **options)
    def body(a="", b=""): ...

    app.finalize()


def warnings(app):
    guard_tasks(app)
    return list(about_tasks(app))


class TestMissed:
    @pytest.mark.parametrize(
        "options",
        [
            {"lock_unique_until": "start"},
            {"lock_unique_until": "end", "lock_on_duplicate": "replace"},
        ],
    )
    def test_a_message_that_may_be_missed(self, app, options):
        """It comes while an older one runs, and is dropped."""
        declare(app, "shop.index", base=SingletonTask, lock_on_conflict="skip", **options)
        (warning,) = warnings(app)
        assert "what it was sent for is missed: shop.index" in warning

    @pytest.mark.parametrize(
        "options",
        [
            {"lock_unique_until": "end"},
            {"lock_unique_until": "start", "lock_limit": None, "lock_key": "k"},
        ],
    )
    def test_others_are_not(self, app, options):
        """No message comes while one runs, or it can run beside it."""
        declare(app, "shop.index", base=SingletonTask, lock_on_conflict="skip", **options)
        assert warnings(app) == []


class TestVisibility:
    @pytest.mark.parametrize(
        ("options", "conf", "seconds"),
        [
            ({"time_limit": 3601}, {}, 3600),
            ({}, {"task_time_limit": 7200}, 3600),
            ({"max_renew_times": 361}, {}, 3600),
            ({"max_renew_times": 0}, {}, 3600),
            ({"lock_expire": 4000}, {}, 3600),
            ({}, {"broker_transport_options": {"visibility_timeout": 60}}, 60),
        ],
    )
    def test_a_task_that_outlives_it_is_named(self, app, options, conf, seconds):
        """acks_late on Redis: what may last longer is delivered again."""
        app.conf.update(conf)
        declare(app, "shop.export", base=SingletonTask, acks_late=True, **options)
        (warning,) = warnings(app)
        assert "shop.export" in warning
        assert f"visibility_timeout of {seconds} s" in warning

    @pytest.mark.parametrize(
        ("options", "conf", "broker"),
        [
            ({"acks_late": True}, {}, "redis://"),
            ({"acks_late": True, "time_limit": 60, "max_renew_times": 0}, {}, "redis://"),
            ({"max_renew_times": 0}, {}, "redis://"),
            ({"acks_late": True, "max_renew_times": 0}, {}, "amqp://"),
            (
                {"acks_late": True, "time_limit": 7200},
                {"broker_transport_options": {"visibility_timeout": 7200}},
                "redis://",
            ),
        ],
    )
    def test_others_are_not(self, options, conf, broker):
        """The defaults fit, as do a time limit, an early acknowledgement and another broker."""
        app = without_strangers(Celery("shop", broker=broker, set_as_current=False))
        app.conf.update(conf, dislock_url="redis://")
        declare(app, "shop.export", base=SingletonTask, **options)
        assert warnings(app) == []


class TestUnlocked:
    def test_a_key_alone_does_not_lock_without_the_flag(self, app):
        """A lock_key on another base class is silently nothing, so the worker says it."""
        declare(app, "shop.export", lock_key="k")
        declare(app, "shop.sync", base=SingletonTask, lock_key="k")
        (warning,) = about_tasks(app)
        assert "shop.export" in warning
        assert "shop.sync" not in warning
        assert "--dislock" in warning

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"lock_key": False},
            {"lock_expiry": 60, "unique_on": None},  # of celery-singleton
        ],
    )
    def test_no_lock_wanted_no_warning(self, app, options):
        """Such tasks are as they are meant."""
        declare(app, "shop.export", **options)
        assert list(about_tasks(app)) == []

    def test_many_tasks_are_counted(self, app):
        """A long list is cut short."""
        for number in range(8):
            declare(app, f"shop.task{number}", lock_limit=2)
        (warning,) = about_tasks(app)
        assert "shop.task4 and 3 others" in warning


class TestReject:
    def test_a_task_whose_messages_cannot_be_rejected_is_named(self, app):
        """Without acks_late the broker has forgotten the message when the task meets the lock."""
        declare(app, "shop.export", base=SingletonTask, lock_on_conflict="reject")
        (warning,) = warnings(app)
        assert "shop.export" in warning
        assert "acks_late=True" in warning

    @pytest.mark.parametrize(
        ("options", "conf"),
        [
            ({"lock_on_conflict": "reject", "acks_late": True}, {}),
            ({"lock_on_conflict": "reject"}, {"task_acks_late": True}),
            ({"lock_on_conflict": "skip"}, {}),
        ],
    )
    def test_others_are_not(self, app, options, conf):
        """A late acknowledgement, by the task or the app, and any other strategy."""
        app.conf.update(conf)
        declare(app, "shop.export", base=SingletonTask, **options)
        assert warnings(app) == []


class TestServer:
    @pytest.mark.parametrize(
        ("info", "words"),
        [
            ({"maxmemory_policy": "volatile-lru", "maxmemory": "1000000"}, ["lru", "noeviction"]),
            ({"role": "slave"}, ["replica", "Give the master's URL"]),
        ],
    )
    def test_one_that_makes_locks_unsafe(self, info, words):
        """It evicts keys with an expiry, and so locks; or it answers, and takes no lock."""
        (warning,) = about_server(info)
        assert all(word in warning for word in words)

    @pytest.mark.parametrize(
        "info",
        [
            {},
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
    declare(app, "shop.export", lock_key="k", acks_late=True, time_limit=9999)
    step = LockStep(SimpleNamespace(app=app, hostname="w1@here"), dislock=True)
    with caplog.at_level(logging.WARNING, "celery_dislock"):
        step.start(None)
    assert ["replica" in caplog.text, "shop.export" in caplog.text] == [True, True]
