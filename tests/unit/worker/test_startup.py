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
    def body(): ...

    app.finalize()


def declare_with(app, name, strategy, **options):
    @app.task(name=name, shared=False, lock_on_conflict=strategy, **options)
    def body(a="", b=""): ...

    app.finalize()


def warnings(app, *, enabled=True):
    if enabled:
        guard_tasks(app)
    return list(about_tasks(app, enabled=enabled))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"lock_unique_until": "start"}, True),
        ({"lock_unique_until": "end", "lock_on_duplicate": "replace"}, True),
        ({"lock_unique_until": "end"}, False),
        ({"lock_unique_until": "start", "lock_limit": None, "lock_key": "k"}, False),
    ],
)
def test_a_message_that_may_be_missed_is_told(app, options, told):
    """It comes while an older one runs, and is dropped."""
    declare_with(app, "shop.index", "skip", base=SingletonTask, **options)
    lines = [line for line in warnings(app) if "what it was sent for is missed: shop.index" in line]
    assert len(lines) == told


class TestVisibility:
    @pytest.mark.parametrize(
        ("options", "conf", "reason"),
        [
            ({"time_limit": 3601}, {}, "time_limit of 3601 s"),
            ({}, {"task_time_limit": 7200}, "time_limit of 7200 s"),
            ({"max_renew_times": 361}, {}, "cap of 3610 s"),
            ({"max_renew_times": 0}, {}, "no time_limit and no max_renew_times"),
            ({"lock_expire": 4000}, {}, "lock_expire of 4000 s"),
            ({}, {"broker_transport_options": {"visibility_timeout": 60}}, "timeout of 60 s"),
        ],
    )
    def test_a_task_that_outlives_it_is_named(self, app, options, conf, reason):
        """acks_late on Redis: what may last longer than the visibility timeout, and why."""
        app.conf.update(conf)
        declare(app, "shop.export", base=SingletonTask, acks_late=True, **options)
        (warning,) = warnings(app)
        assert reason in warning
        assert "shop.export" in warning
        assert "visibility_timeout" in warning

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
    @pytest.mark.parametrize("option", [{"lock_key": "k"}, {"lock_limit": 2}])
    def test_a_task_that_asks_for_a_lock_in_a_worker_without(self, app, option):
        """--no-dislock beside a lock_* option names the task and the remedy."""
        declare(app, "shop.export", **option)
        declare(app, "shop.plain")
        (warning,) = warnings(app, enabled=False)
        assert "shop.export" in warning
        assert "shop.plain" not in warning
        assert "--no-dislock" in warning

    def test_a_singleton_task_asks_for_one_by_its_base(self, app):
        """It needs no option to be named."""
        declare(app, "shop.export", base=SingletonTask)
        assert "shop.export" in warnings(app, enabled=False)[0]

    def test_a_key_alone_does_not_lock_without_the_flag(self, app):
        """Neither flag: a lock_key on another base class is silently nothing, so it is said."""
        declare(app, "shop.export", lock_key="k")
        declare(app, "shop.sync", base=SingletonTask, lock_key="k")
        (warning,) = warnings(app, enabled=None)
        assert "shop.export" in warning
        assert "shop.sync" not in warning
        assert "--dislock" in warning

    def test_no_lock_wanted_no_warning(self, app):
        """lock_key=False and tasks without options are as they are meant."""
        declare(app, "shop.export", lock_key=False)
        declare(app, "shop.plain")
        assert warnings(app, enabled=None) == warnings(app, enabled=False) == []

    def test_the_options_of_other_libraries_are_no_wish_for_a_lock_of_ours(self, app):
        """A task of celery-singleton in the same app has its lock from there."""
        declare(app, "shop.export", lock_expiry=60, unique_on=None)
        assert warnings(app, enabled=None) == warnings(app, enabled=False) == []

    def test_many_tasks_are_counted(self, app):
        """A long list is cut short."""
        for number in range(8):
            declare(app, f"shop.task{number}", lock_key="k")
        assert "shop.task4 and 3 others" in warnings(app, enabled=False)[0]


class TestReject:
    def test_a_task_whose_messages_cannot_be_rejected_is_named(self, app):
        """Without acks_late the broker has forgotten the message when the task meets the lock."""
        declare(app, "shop.export", base=SingletonTask, lock_on_conflict="reject")
        (warning,) = warnings(app)
        assert "shop.export" in warning
        assert "acks_late=True" in warning

    @pytest.mark.parametrize(
        "options",
        [{"lock_on_conflict": "reject", "acks_late": True}, {"lock_on_conflict": "skip"}],
    )
    def test_others_are_not(self, app, options):
        """A late acknowledgement, and any other strategy."""
        declare(app, "shop.export", base=SingletonTask, **options)
        assert warnings(app) == []

    def test_the_apps_default_counts(self, app):
        """task_acks_late is as good as acks_late."""
        app.conf.task_acks_late = True
        declare(app, "shop.export", base=SingletonTask, lock_on_conflict="reject")
        assert warnings(app) == []


class TestServer:
    def test_an_eviction_policy_is_told(self):
        """A server that evicts keys with a TTL evicts locks."""
        (warning,) = about_server({"maxmemory_policy": "volatile-lru", "maxmemory": "1000000"})
        assert "volatile-lru" in warning
        assert "noeviction" in warning

    @pytest.mark.parametrize(
        "info",
        [
            {},
            {"role": "master", "maxmemory_policy": "noeviction", "maxmemory": "1000000"},
            {"maxmemory_policy": "allkeys-lru", "maxmemory": "0"},
        ],
    )
    def test_a_sound_one_is_not(self, info):
        """No bound on memory, nothing to evict for."""
        assert list(about_server(info)) == []

    def test_a_replica_is_told(self):
        """It answers, and takes no lock."""
        (warning,) = about_server({"role": "slave"})
        assert "replica" in warning


def test_a_worker_says_them_once_it_has_started(app, monkeypatch, caplog):
    """The warnings are in the worker's log, not on a terminal that nobody reads."""
    monkeypatch.setattr(Store, "ping", lambda _: {"role": "slave"})
    declare(app, "shop.export", lock_key="k", acks_late=True, time_limit=9999)
    step = LockStep(SimpleNamespace(app=app, hostname="w1@here"), dislock=True)
    with caplog.at_level(logging.WARNING, "celery_dislock"):
        step.start(None)
    assert ["replica" in caplog.text, "shop.export" in caplog.text] == [True, True]
