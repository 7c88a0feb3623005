"""A lock server that answers, and does not run the scripts, or not all of them."""

from __future__ import annotations

import pytest
from celery import Celery

from celery_dislock import Dislock
from celery_dislock.exceptions import ForbiddenError
from celery_dislock.servers.store import Store
from celery_dislock.servers.trial import complaints
from celery_dislock.worker.steps import check_lock_server
from proof.proxy import Proxy, cut, swallow_reply
from tests.conftest import BOTH
from tests.integration.test_doctor import Report
from tests.redis_server import RedisServer

ALWAYS = 1000  # times
SOON = {"socket_timeout": 0.5}
SCRIPTS = {b"EVAL", b"EVALSHA", b"SCRIPT"}
LUA = "runs Lua scripts"
# What servers and proxies say that run no scripts, or not ours; and what helps.
WORDS = {
    "-ERR unknown command 'EVALSHA'": "rename-command",
    "-ERR unknown command `EVALSHA`, with args beginning with: `0`, `1`,": "rename-command",
    "-NOPERM User dislock has no permissions to run the 'evalsha' command": "ACL SETUSER",
    "-NOPERM this user has no permissions to run the 'eval' command": "ACL SETUSER",
    "-ERR EVALSHA is not supported by this proxy": LUA,
    "-ERR command not allowed in the free plan": LUA,
    "-ERR This command is disabled": LUA,
    "-ERR operation not permitted": LUA,
    "-ERR invalid request": LUA,
    "-NOTSUPPORTED Lua scripting": LUA,
    "-ERR Error running script: script tried accessing undeclared key": "allow-undeclared-keys",
    "-ERR bad lua script, all the keys should be passed using the KEYS array": "undeclared keys",
    cut: LUA,
    swallow_reply: LUA,
}


@pytest.fixture
def proxy(redis_url, redis_server):
    with Proxy(redis_server.port) as proxy:
        yield proxy


def start_worker(url: str) -> tuple[str, list[str]]:
    """Do what a worker does under --dislock before it starts."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    Dislock(app)
    app.conf.update(dislock_url=url, dislock_enabled=True, dislock_transport_options=SOON)
    return check_lock_server(app)


def runs_scripts(command):
    return command[0] in SCRIPTS


@pytest.mark.parametrize("words", WORDS)
def test_a_server_that_refuses_scripts_is_refused(proxy, redis_client, words):
    """In whatever words: no worker starts, doctor calls it serious, and the remedy fits."""
    proxy.fault(runs_scripts, words, times=ALWAYS)
    with pytest.raises(ForbiddenError, match=WORDS[words]):
        start_worker(proxy.url)
    [(level, _)] = Report(proxy.url, dislock_transport_options=SOON).found("rights")
    assert level == "serious"
    assert redis_client.keys() == []


@pytest.mark.parametrize("happens", [cut, "-ERR try again later"])
def test_what_fails_once_is_tried_again(proxy, happens):
    """A connection that breaks, or an error that does not come again, keeps no worker away."""
    start_worker(proxy.url)  # the server has the scripts
    proxy.fault(runs_scripts, happens)
    assert start_worker(proxy.url)[1] == []


def test_a_server_whose_info_is_refused_is_used(proxy):
    """Whatever the words; the worker says what it cannot know."""
    proxy.fault(lambda command: command[0] == b"INFO", "-ERR no such command", times=ALWAYS)
    _, [warning] = start_worker(proxy.url)
    assert "INFO" in warning


@pytest.mark.parametrize("command", ["EVAL", "EVALSHA", "HSET", "BLPOP"])
def test_commands_that_are_renamed(redis_program, tmp_path, command):
    """An ACL would not help, and is not named."""
    with RedisServer(tmp_path, args=["--rename-command", command, "other"]) as server:
        with pytest.raises(ForbiddenError, match=rf"does not know .*{command}\b") as caught:
            start_worker(server.url)
        assert "rename-command" in str(caught.value)
        assert "ACL" not in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "value"), [("maxmemory", 1), ("min-replicas-to-write", 1)], ids=["full", "alone"]
)
def test_a_server_that_refuses_writes_keeps_no_worker_from_starting(
    own_redis_server, setting, value
):
    """It passes, and what holds a lock must be renewed; doctor calls it serious."""
    start_worker(own_redis_server.url)
    with own_redis_server.client() as client:
        client.config_set(setting, value)
        assert start_worker(own_redis_server.url)[1] == []
        report = Report(own_redis_server.url)
        assert [level for level, _ in report.found("writes")] == ["serious"]
        assert report.found("rights") == []
        assert client.keys() == []


def test_a_replica_refuses_nothing(own_redis_server, redis_server):
    """That it is one is told by its role."""
    with own_redis_server.client() as client:
        client.replicaof("127.0.0.1", str(redis_server.port))
        _, [warning] = start_worker(own_redis_server.url)
    assert "replica" in warning


@BOTH
def test_the_servers_of_these_tests_refuse_nothing(redis_url, redis_client):
    """Neither a Redis nor fakeredis, whether they have the scripts or not."""
    store = Store(redis_url)
    assert [complaints(store.lock_server, "dislock") for _ in range(2)] == [[], []]
    assert redis_client.keys() == []
    store.close()
