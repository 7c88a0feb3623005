"""Uniqueness when sending, in apps that were set up in every way but the usual one."""

from __future__ import annotations

import contextlib
from datetime import datetime, timedelta, timezone

import pytest
from celery import Celery, Task, shared_task

from celery_dislock import Dislock, SingletonTask
from celery_dislock.exceptions import DuplicateTaskError
from tests.integration.test_unique import LOCK, declare, messages, reserved_for


@pytest.fixture
def client(redis_client):
    return redis_client


@pytest.fixture
def make(redis_url):
    """Make apps with the plugin; all are closed at the end."""
    with contextlib.ExitStack() as stack:

        def make(name="stranger", *, plugin=True, **conf):
            app = Celery(name, broker=redis_url, set_as_current=False)
            app.conf.update(conf)
            if plugin:
                stack.enter_context(Dislock(app))
            stack.callback(app.close)
            return app

        yield make


class TestResults:
    def test_a_duplicate_gets_what_the_first_has_returned(self, make):
        """State and result are those of the first."""
        app = make(result_backend="cache+memory://")
        edit = declare(app)
        first, second = edit.delay(1), edit.delay(1)
        app.backend.store_result(first.id, "done", "SUCCESS")
        assert (second.state, second.get(timeout=1)) == ("SUCCESS", "done")

    @pytest.mark.parametrize(
        ("conf", "options"),
        [
            ({"task_always_eager": True}, {}),
            ({"dislock_enabled": False}, {}),
            ({"dislock_url": "redis://127.0.0.1:1/0"}, {}),
            ({}, {"link": "another"}),
            ({}, {"retries": 1, "task_id": "other"}),
        ],
        ids=["eager", "off", "away", "linked", "retried"],
    )
    def test_every_result_says_whether_it_is_a_duplicate(self, make, conf, options):
        """Else the caller's code breaks on the day on which the lock server is away."""
        edit = declare(make(**conf))
        if "link" in options:
            options = {"link": edit.si(2)}
        edit.delay(1)
        assert edit.apply_async((1,), **options).duplicate is False


class TestIds:
    @pytest.mark.parametrize("on_duplicate", ["return", "raise", "replace"])
    def test_an_id_that_is_given_to_all(self, make, client, on_duplicate):
        """Five sends with one id are one message and four duplicates, but for "replace"."""
        edit = declare(make(), lock_on_duplicate=on_duplicate)
        sent = []
        for _ in range(5):
            with contextlib.suppress(DuplicateTaskError):
                sent.append(edit.apply_async((1,), task_id="mine"))
        if on_duplicate == "replace":
            assert messages(client) == 5
            return
        assert messages(client) == 1
        duplicates = {"return": [False, True, True, True, True], "raise": [False]}[on_duplicate]
        assert [result.duplicate for result in sent] == duplicates


class TestApps:
    def test_a_shared_task(self, make, client):
        """One function, a task of its own in each app, and each app its own keys."""

        @shared_task(
            name="of-all", base=SingletonTask, lock_key="edit:<doc>", lock_unique_until="start"
        )
        def edit(doc): ...

        for prefix in ("one", "two"):
            app = make(prefix, dislock_prefix=prefix)
            task = app.tasks["of-all"]
            assert [task.delay(1).duplicate for _ in range(2)] == [False, True]
            assert reserved_for(client, f"{prefix}:{{edit:1}}")
        assert messages(client) == 2

    def test_a_sender_without_the_plugin(self, make, client):
        """An app that knows neither the task nor the plugin sends as ever, and reserves nothing."""
        edit = declare(make())
        stranger = make("plain", plugin=False)
        for _ in range(2):
            stranger.send_task("unique.edit", (1,))
        assert messages(client) == 2
        assert reserved_for(client) is None
        assert edit.delay(1).duplicate is False
        stranger.send_task("unique.edit", (1,))
        assert messages(client) == 4

    def test_a_sender_that_does_not_know_the_task(self, make, client):
        """The options are the task's: without it nobody knows that it is unique."""
        stranger = make("knows-nothing")
        for _ in range(2):
            stranger.send_task("unique.edit", (1,))
        assert messages(client) == 2
        assert not client.keys("dislock*")

    @pytest.mark.parametrize(
        ("conf", "options"),
        [
            ({"task_annotations": {"unique.edit": {"lock_unique_until": "start"}}}, {}),
            ({"dislock_unique_until": "start"}, {}),
            ({"dislock_enabled": True}, {"base": Task, "lock_unique_until": "start"}),
            ({}, {"lock_unique_until": "end"}),
        ],
        ids=["annotation", "setting", "a plain task that is guarded", "bound"],
    )
    def test_every_way_to_declare_it(self, make, client, conf, options):
        """An annotation, a setting, any base class; the bound task is no argument of the call."""
        app = make(**conf)
        options = {"base": SingletonTask, "lock_key": "edit:<doc>", "shared": False, **options}

        @app.task(name="unique.edit", bind=True, **options)
        def edit(self, doc): ...

        assert [edit.delay(1).duplicate for _ in range(2)] == [False, True]
        assert messages(client) == 1

    def test_locks_that_are_off(self, make, client):
        """dislock_enabled=False: nothing is reserved, and no header is added."""
        edit = declare(make(dislock_enabled=False))
        for _ in range(2):
            edit.delay(1)
        assert messages(client) == 2
        assert not client.keys("dislock*")
        assert "dislock_unique" not in client.lindex("celery", 0)


class TestExpires:
    @pytest.mark.parametrize(
        "expires",
        [lambda: 60, lambda: datetime.now(timezone.utc) + timedelta(seconds=60)],
        ids=["seconds", "time"],
    )
    @pytest.mark.parametrize(("until", "most"), [("start", 60), ("end", 60), ("expiry", 3600)])
    def test_a_message_that_expires(self, make, client, until, most, expires):
        """RabbitMQ drops it without a word to anybody: its key is free when its time is over."""
        edit = declare(make(), lock_unique_until=until)
        edit.apply_async((1,), expires=expires())
        assert most - 30 < client.ttl(f"{LOCK}:unique") <= most


class TestArguments:
    def test_what_is_given_by_name_and_by_default(self, make, client):
        """The same arguments, however they are given, are the same key."""
        app = make()

        @app.task(base=SingletonTask, lock_unique_until="start", shared=False)
        def edit(doc, edition=0): ...

        calls = [((1,), {}), ((1, 0), {}), ((), {"doc": 1}), ((), {"edition": 0, "doc": 1})]
        assert len({edit.apply_async(args, kwargs).id for args, kwargs in calls}) == 1
        assert messages(client) == 1
        assert edit.delay(1, 1).duplicate is False
