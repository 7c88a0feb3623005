"""What the integration tests share: a plain client, to look at what really is in Redis."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import redis

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def redis_client(redis_url: str) -> Iterator[redis.Redis]:
    """A client of the flushed database, beside the package's own, that speaks str."""
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        yield client
