"""A process group that is killed is gone for its servers, too."""

import socket
import subprocess
import sys
import threading
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
ONE = """
import socket, sys, time
with socket.create_connection(("127.0.0.1", sys.argv[1])):
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
def test_no_connection_is_left(client, group):
    """The server lists none when the kill returns, also those of a process beside the leader."""
    kill_group(group)
    assert len(client.client_list()) == 1
    assert not groups._is_left(group.pid)


@needs_proc
def test_a_server_that_is_slow_is_waited_for():
    """It serves a connection until it has closed its end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-c", ONE, str(server.getsockname()[1])]
        process = subprocess.Popen(command, start_new_session=True)
        serving, _ = server.accept()
        killing = threading.Thread(target=kill_group, args=[process])
        with serving:
            killing.start()
            wait_for(lambda: not groups._is_left(process.pid))
            killing.join(0.5)
            assert killing.is_alive()
        killing.join()


def test_a_leader_that_is_dead_leaves_its_group_to_be_killed(client, group):
    group.kill()
    group.wait()
    assert len(client.client_list()) > CONNECTIONS
    kill_group(group)
    wait_for(lambda: len(client.client_list()) == 1)


@pytest.mark.usefixtures("client")
def test_a_server_that_is_halted_is_not_waited_for(own_redis_server, group):
    """Nor are the connections that it has not accepted."""
    own_redis_server.pause()
    waiting = redis.Connection(port=own_redis_server.port)
    waiting._connect().close()
    kill_group(group)
    own_redis_server.resume()


@pytest.mark.usefixtures("client")
def test_without_proc_the_processes_are_waited_for(group, monkeypatch, tmp_path):
    monkeypatch.setattr(groups, "PROC", tmp_path / "proc")
    kill_group(group)
    monkeypatch.undo()
    assert not groups._is_left(group.pid)
