"""Fixtures of the tests on driven locks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from celery_dislock import signals
from tests.integration.driven import Driven, driving, listening

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def driven(request: pytest.FixtureRequest) -> Iterator[Driven]:
    """A lock server whose time and commands are the test's, and locks on it."""
    with driving(request.node.nodeid) as driven:
        yield driven


@pytest.fixture
def heard() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Names and arguments of the lock signals that were sent, in order."""
    with listening() as events:
        yield events


@pytest.fixture
def receive() -> Iterator[Callable[[str, Callable[..., object]], None]]:
    """Connect a receiver to a signal, by its name, until the test ends."""
    connected = []

    def connect(name: str, receiver: Callable[..., object]) -> None:
        signal = getattr(signals, name)
        signal.connect(receiver, weak=False)
        connected.append((signal, receiver))

    yield connect
    for signal, receiver in connected:
        signal.disconnect(receiver)
