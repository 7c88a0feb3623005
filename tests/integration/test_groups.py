"""A process group that is killed is gone for its servers, too."""

import subprocess
import sys
from pathlib import Path

import pytest
import redis

from tests import groups
from tests.groups import kill_group
from tests.holding import wait_for

CONNECTIONS = 40
PROGRAM = """
import os, sys, time, redis
os.fork()
connections = [redis.Connection(port=int(sys.argv[1])) for _ in range(int(sys.argv[2]))]
for connection in connections:
    connection.connect()
time.sleep(600)
"""

needs_proc = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="there is no /proc")


@pytest.fixture
def group(own_redis_server):
    """Two processes with connections to a server."""
    command = [sys.executable, "-c", PROGRAM, str(own_redis_server.port), str(CONNECTIONS)]
    process = subprocess.Popen(command, start_new_session=True)
    yield process
    kill_group(process)


@pytest.fixture
def client(own_redis_server, group):
    """A client of the server to which the group has connected."""
    with own_redis_server.client() as client:
        wait_for(lambda: len(client.client_list()) > 2 * CONNECTIONS)
        yield client


@needs_proc
@pytest.mark.parametrize("leader_is_dead", [False, True])
def test_no_connection_is_left(client, group, leader_is_dead):
    """The server lists none when the kill returns, also those of a process beside the leader."""
    if leader_is_dead:
        group.kill()
        group.wait()
        assert len(client.client_list()) > CONNECTIONS
    kill_group(group)
    assert len(client.client_list()) == 1
    assert not groups._is_left(group.pid)


@pytest.mark.usefixtures("client")
def test_a_server_that_is_halted_is_not_waited_for(own_redis_server, group):
    """Nor are the connections that it has not accepted."""
    own_redis_server.pause()
    waiting = redis.Connection(port=own_redis_server.port)
    waiting._connect().close()
    kill_group(group)
    own_redis_server.resume()
