"""A test that leaves a connection to the garbage collector is named, and no other."""

import os
import re
import sys
from pathlib import Path

from tests.programs import run

ROOT = Path(__file__).parents[2]
RUN = """
import asyncio, gc, os, redis, redis.asyncio
from tests.unclosed import note_connections

PORT = int(os.environ["REDIS_PORT"])
note_connections()
gc.disable()
kept = []

def connected():
    connection = redis.Connection(port=PORT)
    connection.connect()
    return connection

async def connected_in_a_loop():
    connection = redis.asyncio.Connection(port=PORT)
    await connection.connect()
    return connection

def test_closes():
    connected().disconnect()

def test_leaves():
    connected()

def test_leaves_a_cycle():
    connection = connected()
    connection.itself = connection

def test_leaves_one_of_asyncio():
    async def leave():
        connection = await connected_in_a_loop()
        connection.itself = connection
    asyncio.run(leave())

def test_keeps():
    kept.append(connected())

def test_drops():
    kept.clear()

def test_forks():
    connection = connected()
    pid = os.fork()
    if not pid:
        del connection
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    connection.disconnect()
"""
ERROR = r"at teardown of (\w+) _+\nleft open .*: test_run.py::(\w+) made "
FOUND = {
    "test_leaves": "test_leaves",
    "test_leaves_a_cycle": "test_leaves_a_cycle",
    "test_leaves_one_of_asyncio": "test_leaves_one_of_asyncio",
    "test_drops": "test_keeps",
}


def test_whoever_leaves_one_is_named(tmp_path, redis_server):
    """At once; if the connection can be reached at the end of the test, when it is collected."""
    (tmp_path / "test_run.py").write_text(RUN, "utf-8")
    env = {**os.environ, "REDIS_PORT": str(redis_server.port)}
    env |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    pytest = (sys.executable, "-m", "pytest", "-q", "-p", "tests.unclosed", "test_run.py")
    said = run(*pytest, status=None, cwd=tmp_path, env=env).stdout
    assert dict(re.findall(ERROR, said)) == FOUND, said
