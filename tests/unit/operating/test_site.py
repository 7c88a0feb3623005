"""What is known beside the locks: unique tasks, messages that wait, who sweeps."""

from __future__ import annotations

import pytest
from celery import Celery

from celery_dislock import SingletonTask
from celery_dislock.exceptions import StoreError
from celery_dislock.operating.site import Site
from tests.pages import FakeOverview, holder, lock


def report(corp_id): ...


@pytest.fixture
def app():
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.dislock_url = "redis://nobody/0"
    unique = {"base": SingletonTask, "lock_unique_until": "end", "shared": False}
    app.task(name="a", lock_key="a:<corp_id>", **unique)(report)
    app.task(name="b", lock_key=["b", "a:b"], lock_unique_for=60, **unique)(report)
    app.task(name="c:c", **unique)(report)
    app.task(name="d", lock_key="a:<corp_id>", base=SingletonTask, shared=False)(report)
    app.conf.task_routes = {"a": {"queue": "slow"}, "b": {"queue": "routed"}}
    return app


@pytest.mark.parametrize(
    ("key", "found"),
    [
        ("a:7", [(3600.0, "slow")]),
        ("a:b and others", [(3600.0, "slow"), (60.0, "routed")]),
        ("c%3Ac:9f", [(3600.0, "celery")]),
        ("x", []),
    ],
)
def test_the_tasks_that_may_have_a_key(app, key, found):
    """By what their keys begin with; with the queue that each is routed to."""
    tasks = Site(FakeOverview(), "dislock", app).tasks_of(key)
    assert [(one.unique_for, one.queue) for one in tasks] == found
    assert Site(FakeOverview(), "dislock").tasks_of(key) == []


def test_messages_are_counted_once(app):
    """A queue that is not there has none; without an app nothing is known."""
    with app.connection_for_write() as connection:
        connection.default_channel.queue_declare(queue="slow")
        site = Site(FakeOverview(), "dislock", app)
        connection.SimpleBuffer("slow").put("x")
        assert site.messages_in(["slow", "nowhere"]) == 1
        connection.SimpleBuffer("slow").put("y")
        assert site.messages_in(["slow"]) == 1
    assert Site(FakeOverview(), "dislock").messages_in(["slow"]) is None


def test_a_broker_that_is_away_is_not_known():
    """Nothing is concluded from it, and nothing is raised."""
    app = Celery("shop", broker="redis://localhost:1/0", set_as_current=False)
    site = Site(FakeOverview(), "dislock", app)
    assert site.messages_in(["celery"]) is None
    assert app.conf.broker_transport_options == {}


def test_who_sweeps_is_asked_once():
    """A server that does not answer tells nothing."""
    overview = FakeOverview()
    overview.put(lock(name="dislock:sweep:{here}", holders=[holder()]))
    site = Site(overview, "dislock")
    assert [site.is_swept(home) for home in ("here", "there", "here")] == [True, False, True]
    assert len(overview.asked) == 2
    overview.error = StoreError("redis://h", "away")
    assert site.is_swept("elsewhere")
