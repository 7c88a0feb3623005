"""Fixtures of the unit tests: no Redis, no threads, no sleeps."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from itertools import count

import pytest
from celery import Celery, _state
from celery.backends import cache

from celery_dislock import Dislock, signals
from celery_dislock.config.settings import AppSettings
from celery_dislock.parking.process import ParkingProcess, runtime_of
from celery_dislock.servers.store import Store
from celery_dislock.worker import steps
from tests.unit.deliveries import Broker
from tests.unit.fakes import FakeIdentity, World


@pytest.fixture
def world():
    return World()


@pytest.fixture(autouse=True)
def shared_tasks_are_the_tests_own(monkeypatch):
    """Celery gives a shared task of one test to the apps of all later ones."""
    monkeypatch.setattr(_state, "_on_app_finalizers", set(_state._on_app_finalizers))


@pytest.fixture
def app(world, monkeypatch):
    """An app whose locks are kept in the world's store, by the world's clock."""
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    cache._DUMMY_CLIENT_CACHE.clear()  # else results outlive their app
    app.task = partial(app.task, shared=False)  # other apps of this run have tasks of these names

    process = ParkingProcess({"dislock_url": "redis://"}, AppSettings(), None)
    process.store, process.watchdog, process.pid = world.store, world.watchdog, 42
    process.quick_store, process.identity = world.store, FakeIdentity()
    numbers = count(1)
    process.owner_name = lambda start: f"{start}{next(numbers)}"
    monkeypatch.setattr(type(runtime_of(app)), "process", property(lambda _: process))
    return app


@pytest.fixture
def heard():
    """Names and arguments of the lock signals that were sent, in order."""
    events = []
    receivers = []
    for name in signals.__all__:

        def receive(_name=name, **kwargs):
            kwargs.pop("signal")
            events.append((_name, kwargs))

        getattr(signals, name).connect(receive, weak=False)
        receivers.append((getattr(signals, name), receive))
    yield events
    for signal, receive in receivers:
        signal.disconnect(receive)


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
def broker(app, monkeypatch):
    """What the app sends."""
    broker = Broker()
    monkeypatch.setattr(app, "send_task", broker)
    monkeypatch.setattr(app, "producer_or_acquire", broker.acquired)
    return broker


@pytest.fixture
def reachable(monkeypatch):
    """A lock server that a worker's start-up check finds well."""
    monkeypatch.setattr(steps, "check_rights", lambda *_: None)
    monkeypatch.setattr(Store, "ping", lambda _: {})
