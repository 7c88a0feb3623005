"""Fixtures of the unit tests: no Redis, no threads, no sleeps."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from celery import Celery, _state

from celery_dislock import Dislock
from celery_dislock.servers.store import Store
from celery_dislock.worker import steps
from tests.driven import Broker, LockServer, new_app
from tests.integration.driven import listening

BUILTIN = "celery.app.builtins"


@pytest.fixture(autouse=True)
def shared_tasks_are_the_tests_own(monkeypatch):
    """Celery gives a shared task of one module to the apps of all others."""
    celerys = {one for one in _state._on_app_finalizers if one.__module__ == BUILTIN}
    monkeypatch.setattr(_state, "_on_app_finalizers", celerys)


@pytest.fixture
def lock_server(monkeypatch):
    """The lock server of all apps of the test, which has the time of all clocks."""
    server = LockServer()
    server.drive(monkeypatch)
    return server


@pytest.fixture
def app(lock_server):
    """An app whose locks are on that server."""
    return new_app()


@pytest.fixture
def broker(lock_server, monkeypatch):
    """What is published."""
    return Broker(lock_server, monkeypatch)


@pytest.fixture
def heard():
    """Names and arguments of the lock signals that were sent, in order."""
    with listening() as events:
        yield events


@pytest.fixture
def receiving():
    """Connect a receiver for the time of a ``with`` block."""

    @contextmanager
    def connected(signal, receiver):
        signal.connect(receiver, weak=False)
        try:
            yield
        finally:
            signal.disconnect(receiver)

    return connected


@pytest.fixture
def plain_app():
    """An app with a broker that is away, and no store of the world's."""
    app = Celery("shop", broker="redis://localhost:1/0", set_as_current=False)
    Dislock(app)
    return app


@pytest.fixture
def reachable(monkeypatch):
    """A lock server that a worker's start-up check finds well."""
    monkeypatch.setattr(steps, "check_scripts", lambda *_: None)
    monkeypatch.setattr(Store, "ping", lambda _: {"role": "master"})
