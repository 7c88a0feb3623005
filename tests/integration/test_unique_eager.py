"""Uniqueness of eager tasks, by apply() and by a setting: the same story as with a worker."""

from __future__ import annotations

import json

import pytest
from celery import Celery

from celery_dislock import Dislock, SingletonTask
from tests.integration.test_unique import LOCK, declare, messages, reserved_for


@pytest.fixture
def app(redis_url):
    app = Celery("eager", broker=redis_url, backend="cache+memory://", set_as_current=False)
    with Dislock(app):
        yield app
    app.close()


@pytest.fixture
def client(redis_client):
    return redis_client


@pytest.fixture(params=["apply", "task_always_eager"])
def call(app, request):
    """Call a task eagerly, in each of the two ways."""

    def call(task, *args):
        app.conf.task_always_eager = request.param == "task_always_eager"
        try:
            if request.param == "apply":
                return task.apply(args)
            return task.delay(*args)
        finally:
            app.conf.task_always_eager = False

    return call


@pytest.mark.parametrize("until", ["start", "end"])
def test_one_after_the_other(app, client, call, until):
    """Each runs, and nothing stays reserved."""
    edit = declare(app, lock_unique_until=until)
    for _ in range(2):
        result = call(edit, 1)
        assert (result.state, result.duplicate) == ("SUCCESS", False)
    assert not client.keys("*:unique")
    assert messages(client) == 0


@pytest.mark.parametrize(("until", "duplicate"), [("start", False), ("end", True)])
def test_a_call_in_the_body(app, client, call, until, duplicate):
    """With "end" its own key is reserved for as long as it runs."""
    inner = []

    @app.task(
        base=SingletonTask,
        lock_key="edit:<doc>",
        lock_unique_until=until,
        lock_limit=None,
        shared=False,
    )
    def edit(doc):
        if not inner:
            inner.append(None)
            inner[0] = call(edit, doc)
        return len(inner)

    outer = call(edit, 1)
    assert outer.get() == 1
    assert inner[0].duplicate is duplicate
    assert (inner[0].id == outer.id) is duplicate
    assert reserved_for(client) is None


def test_one_for_a_time(app, call):
    """With "expiry" the second call returns the result of the first, as a duplicate."""
    ran = []

    @app.task(base=SingletonTask, lock_key="<doc>", lock_unique_until="expiry", shared=False)
    def edit(doc):
        ran.append(doc)
        return "done"

    first, second = call(edit, 1), call(edit, 1)
    assert (first.duplicate, second.duplicate) == (False, True)
    assert (second.id, second.get(), ran) == (first.id, "done", [1])


@pytest.mark.parametrize("until", ["start", "end", "expiry"])
def test_beside_a_message_that_waits(app, client, call, until):
    """It is a duplicate of that message, which keeps its key."""
    edit = declare(app, lock_unique_until=until)
    first = edit.delay(1)
    second = call(edit, 1)
    assert (second.id, second.duplicate) == (first.id, True)
    assert reserved_for(client) == first.id


def test_a_message_that_is_replaced(app, client, call):
    """With "replace" the eager call is the newest: it runs, and the message ends when it comes."""
    edit = declare(app, lock_on_duplicate="replace")
    edit.delay(1)
    _, _, mark, number = json.loads(client.lindex("celery", 0))["headers"]["dislock_unique"]
    assert call(edit, 1).duplicate is False
    record = client.get(f"{LOCK}:unique").split(" ")
    assert record[9] == mark
    assert int(record[12]) > number


@pytest.mark.parametrize("until", ["start", "end", "expiry"])
def test_a_retry(app, client, call, until):
    """It runs within the first, under its id, and is no duplicate of it."""
    ran = []

    @app.task(
        bind=True, base=SingletonTask, lock_key="edit:<doc>", lock_unique_until=until, shared=False
    )
    def edit(self, doc):
        ran.append(self.request.retries)
        if self.request.retries < 2:
            raise self.retry(countdown=0)
        return "done"

    assert call(edit, 1).get() == "done"
    assert ran == [0, 1, 2]
    assert (reserved_for(client) is None) is (until != "expiry")
