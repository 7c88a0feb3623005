from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from proof.proxy import Proxy
from tests.holding import Holding

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]


@pytest.fixture
def proxy(redis_url, redis_server) -> Iterator[Proxy]:
    """A proxy before the session's server, which is empty."""
    with Proxy(redis_server.port) as proxy:
        yield proxy


@pytest.fixture
def others(redis_url) -> Iterator[Holding]:
    """Another process's locks, straight at the session's server."""
    with Holding(redis_url) as others:
        yield others
