"""An app with tasks of the other libraries and of ours.  What is not installed skips its tests."""

from importlib.util import find_spec

import pytest
from celery import Celery

from celery_dislock import Dislock, SingletonTask
from tests.docs.migrating.libraries import HOUR, export


@pytest.fixture
def app(redis_url):
    """An app for all libraries: broker and locks on one server, results in memory."""
    with Celery("shop", broker=redis_url, backend="cache+memory://", set_as_current=False) as app:
        settings = {"url": redis_url, "default_timeout": HOUR}
        app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": settings}
        Dislock(app)
        yield app


@pytest.fixture
def fresh(monkeypatch):
    """Make the libraries forget the clients that they keep for ever."""
    for module, name in (
        ("celery_once.backends.redis", "redis"),
        ("celery_singleton.backends", "_backend"),
    ):
        if find_spec(module.partition(".")[0]):
            monkeypatch.setattr(f"{module}.{name}", None)
    return monkeypatch


@pytest.fixture
def theirs(app, fresh):
    """Declare a task of another library; the test is skipped without it."""

    def declare(library, options, body=export, **more):
        module, name = library.base.split(":")
        base = getattr(pytest.importorskip(module), name)
        return app.task(base=base, **{"name": "theirs", "shared": False, **options, **more})(body)

    return declare


@pytest.fixture
def ours(app):
    """Declare a task of ours that is unique when sent."""

    def declare(body=export, **options):
        options = {"name": "ours", "lock_unique_until": "end", **options}
        return app.task(base=SingletonTask, shared=False, **options)(body)

    return declare
