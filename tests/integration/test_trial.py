"""A lock server that answers, and does not run the scripts, or not all of them."""

import pytest

from celery_dislock import scripts
from celery_dislock.exceptions import ForbiddenError
from proof.proxy import Proxy, cut, runs, swallow_reply
from tests.integration.acl import start_worker
from tests.integration.test_doctor import Report
from tests.pace import REPLY
from tests.redis_server import RedisServer

ALWAYS = 1000  # times
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


def runs_scripts(command):
    return command[0] in SCRIPTS


@pytest.mark.parametrize("words", WORDS)
def test_a_server_that_refuses_scripts_is_refused(proxy, redis_client, words):
    """In whatever words: no worker starts, doctor calls it serious, and the remedy fits."""
    proxy.fault(runs_scripts, words, times=ALWAYS)
    options = {"socket_timeout": REPLY} if words is swallow_reply else {}
    with pytest.raises(ForbiddenError, match=WORDS[words]):
        start_worker(proxy.url, dislock_transport_options=options)
    [(level, _)] = Report(proxy.url, dislock_transport_options=options).found("rights")
    assert level == "serious"
    assert redis_client.keys() == []


IN_SCRIPTS = [
    "@user_script: {line}: The user executing the script can't run this command or subcommand",
    "The user executing the script can't run this command script: 0, on @user_script:{line}.",
    "ACL failure in script: User u has no permissions to run the 'hkeys' command",
]


@pytest.mark.parametrize("text", IN_SCRIPTS, ids=["6.2", "7.0", "7.2"])
def test_a_command_that_scripts_may_not_run(proxy, text):
    """Each version of Redis has words of its own for it; the command is named all the same."""
    lines = scripts.RELEASE_DEAD.text.splitlines()
    line = next(number for number, line in enumerate(lines, 1) if "'HKEYS'" in line)
    proxy.fault(runs(scripts.RELEASE_DEAD), f"-ERR {text.format(line=line)}", times=ALWAYS)
    with pytest.raises(ForbiddenError, match=r"may not run HKEYS; .* [+]hkeys$"):
        start_worker(proxy.url)


@pytest.mark.parametrize(
    "text",
    [
        "ERR The user executing the script can't access at least one of the keys mentioned in the",
        "NOPERM ACL failure in script: No permissions to access a key",
        "NOPERM User u has no permissions to access the 'dislock:x' key",
    ],
)
def test_a_key_that_scripts_may_not_touch(proxy, text):
    """That no command is at fault is known, too."""
    proxy.fault(runs_scripts, f"-{text}", times=ALWAYS)
    with pytest.raises(ForbiddenError, match=r"user may not touch all keys .* ~dislock:[*]$"):
        start_worker(proxy.url)


@pytest.mark.parametrize(
    "text",
    [
        "OOM command not allowed when used memory > 'maxmemory'.",
        "ERR Error running script: @user_script: 1: -OOM command not allowed",
        "MISCONF Redis is configured to save RDB snapshots, but",
        *("NOREPLICAS Not enough good replicas to write.", "MOVED 1 127.0.0.1:1"),
        *("ASK 1 127.0.0.1:1", "TRYAGAIN its slot is being moved"),
        *("CLUSTERDOWN Hash slot not served", "BUSY Redis is busy running a script."),
    ],
)
def test_what_passes_by_itself_keeps_no_worker_from_starting(proxy, text):
    """It is told to who asks."""
    proxy.fault(runs_scripts, f"-{text}", times=ALWAYS)
    start_worker(proxy.url)


@pytest.mark.parametrize("command", ["BLPOP", "SCAN", "DEL"])
@pytest.mark.parametrize("text", ["NOPERM no permissions to run it", "ERR unknown command 'x'"])
def test_what_is_sent_beside_scripts(proxy, command, text):
    """Those are named as well, where the server refuses or does not know them."""
    proxy.fault(lambda sent: sent[0] == command.encode(), f"-{text}", times=ALWAYS)
    with pytest.raises(ForbiddenError, match=rf"\b{command}\b"):
        start_worker(proxy.url)


@pytest.mark.parametrize(
    ("happens", "times"),
    [(cut, 1), (cut, 4), ("-ERR try again later", 1)],  # in the first round trip, and three alone
)
def test_what_fails_for_a_moment_is_tried_again(proxy, happens, times):
    """A connection that breaks, or an error that does not come again, keeps no worker away."""
    start_worker(proxy.url)  # the server has the scripts
    proxy.fault(runs_scripts, happens, times=times)
    assert start_worker(proxy.url)[1] == []


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
