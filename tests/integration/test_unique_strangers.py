"""Uniqueness when sending, in apps that were set up in every way but the usual one."""

from __future__ import annotations

import contextlib
from datetime import datetime, timedelta, timezone

import pytest
from celery import Celery, shared_task

from celery_dislock import Dislock, SingletonTask
from celery_dislock.exceptions import DuplicateTaskError
from celery_dislock.tasks.sending import PUBLISH_FOR
from tests.holding import wait_for
from tests.integration.test_unique import LOCK, declare, messages, reserved_for
from tests.redis_server import RedisServer


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
    def test_without_a_result_backend(self, make, client):
        """A duplicate has the id of the first; who wants its result is told what Celery tells."""
        edit = declare(make())
        first, second = edit.delay(1), edit.delay(1)
        assert (second.id, second.duplicate) == (first.id, True)
        for result in (first, second):
            with pytest.raises(NotImplementedError, match="No result backend"):
                result.get(timeout=1)
        assert messages(client) == 1

    @pytest.mark.parametrize("by", ["the task", "the call"])
    def test_a_result_that_is_ignored(self, make, client, by):
        """get() of a duplicate ends at once, as that of the first does."""
        edit = declare(make(result_backend="cache+memory://"), ignore_result=by == "the task")
        options = {"ignore_result": True} if by == "the call" else {}
        first, second = (edit.apply_async((1,), **options) for _ in range(2))
        assert (second.id, second.duplicate) == (first.id, True)
        assert (first.ignored, second.ignored) == (True, True)
        assert (first.get(timeout=1), second.get(timeout=1)) == (None, None)
        assert messages(client) == 1

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
    def test_an_id_that_is_given(self, make, client):
        """It counts if its message is sent; a duplicate has the id of the first all the same."""
        edit = declare(make())
        assert edit.apply_async((1,), task_id="mine").id == "mine"
        assert reserved_for(client) == "mine"
        assert edit.apply_async((1,), task_id="yours").id == "mine"
        assert messages(client) == 1

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
    def test_two_with_different_prefixes(self, make, client):
        """A task of the same name in each: each app has its own keys."""
        sent = []
        for prefix in ("one", "two"):
            edit = declare(make(prefix, dislock_prefix=prefix))
            sent += [edit.delay(1) for _ in range(2)]
            assert reserved_for(client, f"{prefix}:{{edit:1}}") == sent[-1].id
        assert [result.duplicate for result in sent] == [False, True, False, True]
        assert messages(client) == 2

    def test_two_with_different_lock_servers(self, make, client, redis_program, tmp_path):
        """Each reserves on its own."""
        with RedisServer(tmp_path / "other") as other, other.client() as there:
            here, elsewhere = (
                declare(make("here")),
                declare(make("elsewhere", dislock_url=other.url)),
            )
            first, second = here.delay(1), elsewhere.delay(1)
            assert (first.duplicate, second.duplicate) == (False, False)
            assert first.id != second.id
            assert reserved_for(client) == first.id
            assert second.id.encode() in there.get(f"{LOCK}:unique")
            assert elsewhere.delay(1).id == second.id
        assert messages(client) == 2

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

    def test_the_option_as_an_annotation(self, make, client):
        """Celery's setting for options of tasks whose code is not ours."""
        app = make(task_annotations={"unique.edit": {"lock_unique_until": "start"}})

        @app.task(name="unique.edit", base=SingletonTask, lock_key="edit:<doc>", shared=False)
        def edit(doc): ...

        assert [edit.delay(1).duplicate for _ in range(2)] == [False, True]
        assert messages(client) == 1

    def test_the_option_as_a_setting(self, make, client):
        """For all tasks of an app, as every option of a task."""
        app = make(dislock_unique_until="start")

        @app.task(name="unique.edit", base=SingletonTask, lock_key="edit:<doc>", shared=False)
        def edit(doc): ...

        assert [edit.delay(1).duplicate for _ in range(2)] == [False, True]
        assert messages(client) == 1

    def test_a_plain_task_that_is_guarded(self, make, client):
        """dislock_enabled: a task with a lock_key is unique, whatever its base class."""
        app = make(dislock_enabled=True)

        @app.task(
            name="unique.edit", lock_key="edit:<doc>", lock_unique_until="start", shared=False
        )
        def edit(doc): ...

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
    @pytest.mark.parametrize("seconds", [2, 0.5])
    @pytest.mark.parametrize("how", ["lock_unique_for", "expires"])
    def test_a_short_time_is_kept(self, make, client, how, seconds):
        """Nothing rounds it up to the time in which a message must be published."""
        unique_for = seconds if how == "lock_unique_for" else 100
        edit = declare(make(), lock_unique_for=unique_for)
        edit.apply_async((1,), **({} if how == "lock_unique_for" else {"expires": seconds}))
        assert client.pttl(f"{LOCK}:unique") <= seconds * 1000
        wait_for(lambda: reserved_for(client) is None, "the end of the reservation")
        assert edit.delay(1).duplicate is False

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

    def test_one_that_has_expired(self, make, client):
        """It is sent, as Celery does."""
        edit = declare(make())
        edit.apply_async((1,), expires=datetime.now(timezone.utc) - timedelta(seconds=60))
        assert messages(client) == 1
        assert client.ttl(f"{LOCK}:unique") <= PUBLISH_FOR


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

    def test_a_bound_task(self, make, client):
        """The task itself is no argument of the call."""
        app = make()

        @app.task(
            bind=True, base=SingletonTask, lock_key="<doc>", lock_unique_until="end", shared=False
        )
        def edit(self, doc): ...

        assert [edit.delay(1).duplicate for _ in range(2)] == [False, True]
        assert messages(client) == 1

    def test_headers_of_the_caller_stay(self, make, client):
        """Ours is added to theirs, and theirs is not changed."""
        edit = declare(make())
        given = {"mine": 1}
        edit.apply_async((1,), headers=given)
        assert given == {"mine": 1}
        message = client.lindex("celery", 0)
        assert '"mine": 1' in message
        assert "dislock_unique" in message

    def test_wrong_arguments_are_refused_as_ever(self, make, client):
        """Celery's typing raises before anything is reserved."""
        edit = declare(make())
        with pytest.raises(TypeError):
            edit.delay()
        assert not client.keys("dislock*")
        assert messages(client) == 0
