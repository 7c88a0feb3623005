from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import redis_server as module
from tests.holding import wait_for
from tests.programs import run_code
from tests.redis_server import RedisServer, ServerMissing

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
    wait_for(lambda: not alive(pid), f"end of process {pid}")


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


@pytest.mark.parametrize("with_block", [True, False], ids=["in a with", "forgotten"])
def test_ctrl_c_ends_the_server(tmp_path, with_block):
    """An interrupted program ends its server on its way out, also one it forgot to stop."""
    wait = "print(server.pid, flush=True); sys.stdin.read()"
    body = f"with server: {wait}" if with_block else f"server.start(); {wait}"
    code = (
        "import pathlib, signal, sys; from tests.redis_server import RedisServer\n"
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
        program.stdin.close()  # else it never notices a signal that came just before it read
        assert program.wait(30) == -signal.SIGINT
    wait_until_gone(pid)


def test_a_fork_does_not_end_its_parents_server(tmp_path):
    """A forked child that exits, and runs its exit handlers, leaves the server to its parent."""
    code = (
        "import os, pathlib, sys; from tests.redis_server import RedisServer\n"
        f"with RedisServer(pathlib.Path({str(tmp_path)!r}), unix_socket=True) as server:\n"
        "    child = os.fork()\n"
        "    if child == 0: sys.exit()\n"
        "    os.waitpid(child, 0)\n"
        "    server.client().ping()\n"
    )
    run_code(code, cwd=ROOT)


def test_a_missing_server_says_in_one_line_what_to_install(monkeypatch, tmp_path):
    """Where there is neither a program nor the wheel, the error is one line with the remedy."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ServerMissing, match=r"^no redis-server .* PATH: install [^\n]*$"):
        RedisServer(tmp_path).start()
