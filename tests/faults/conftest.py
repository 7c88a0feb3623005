from pathlib import Path

import pytest

from proof.proxy import Proxy
from tests.holding import Holding

ROOT = Path(__file__).parents[2]


@pytest.fixture
def proxy(redis_url, redis_server):
    """A proxy before the session's server, which is empty."""
    with Proxy(redis_server.port) as proxy:
        yield proxy


@pytest.fixture
def others(redis_url):
    """Another process's locks, straight at the session's server."""
    with Holding(redis_url) as others:
        yield others
