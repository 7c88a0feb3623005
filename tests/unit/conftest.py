"""Fixtures of the unit tests: no Redis, no threads, no sleeps."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from celery_dislock import signals
from tests.unit.fakes import World


@pytest.fixture
def world():
    return World()


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
