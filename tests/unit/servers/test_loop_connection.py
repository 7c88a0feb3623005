"""Connections of event loops, whose replies the test gives."""

from __future__ import annotations

import asyncio

import pytest
import redis

from celery_dislock.servers.bridge import run_on_loop
from celery_dislock.servers.loop_connection import LoopConnection


@pytest.fixture
def connection():
    """A connection that is connected, as it says."""
    connection = LoopConnection(redis.Connection, {})
    connection._lost = None
    return connection


def test_no_time_to_wait_is_no_wait(connection):
    """A server that is asked when the time is used up does not hold its caller up for ever."""

    async def main():
        connection._loop = asyncio.get_running_loop()
        return await asyncio.wait_for(run_on_loop(connection.can_read, 0.0), 5)

    assert asyncio.run(main()) is False
    connection.data_received(b"+OK\r\n")
    assert asyncio.run(main()) is True
