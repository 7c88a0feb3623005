"""Fixtures of the unit tests: no Redis, no threads, no sleeps."""

from contextlib import contextmanager

import pytest
from celery import Celery

from celery_dislock import Dislock
from celery_dislock.servers.store import Store
from celery_dislock.worker import steps
from tests.driven import Broker, LockServer, new_app
from tests.integration.driven import listening


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
