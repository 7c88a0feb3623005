"""
Run a RabbitMQ server of one's own, and end it again.

As with Redis, no test uses a server that happens to listen, and none is shared with the system's
own: node name, data, Erlang cookie, ports and even the Erlang port mapper belong to this server
alone, and all of them are on the loopback.  A server counts as started when it answers *and* says
the name that was given to it; between the choice of a free port and the bind, another process can
take it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import amqp
from amqp.exceptions import AMQPError

from tests.programs import missing, run
from tests.redis_server import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

START_TIMEOUT = 90.0  # seconds until a new server must answer
STOP_TIMEOUT = 15.0  # seconds after SIGTERM until SIGKILL
KNOCK_TIMEOUT = 5.0  # seconds that a server which accepts connections may take to answer
POLL_INTERVAL = 0.05  # seconds between two looks at a starting server
START_ATTEMPTS = 5  # sets of free ports tried, should others keep taking one
PACKAGED = Path("/usr/lib/rabbitmq/bin")  # a package's own programs: those on PATH change the user
LOOPBACK = "127.0.0.1"


def find_rabbitmq() -> Path | None:
    """Return the folder of rabbitmq-server and rabbitmqctl; None if they or epmd are not there."""
    found = shutil.which("rabbitmq-server")
    if not found or not shutil.which("epmd"):
        return None
    return PACKAGED if (PACKAGED / "rabbitmq-server").exists() else Path(found).parent


class RabbitServer:
    """
    One RabbitMQ node without plugins.  It asks for no user: root's server runs as root.

    Args:
        programs: The folder of its programs.
        folder: Where the server keeps its data, its cookie and its log; made if it is not there.
    """

    def __init__(self, programs: Path, folder: Path) -> None:
        self.folder = Path(folder).resolve()
        self.node = f"dislock-{uuid.uuid4().hex[:8]}@localhost"
        self.port = 0
        self.programs = programs
        self.env: dict[str, str] = {}
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def url(self) -> str:
        """The server's default virtual host."""
        return f"amqp://guest:guest@{LOOPBACK}:{self.port}//"

    def start(self) -> None:
        """Start the server and wait until it answers, on other ports if others take them."""
        for _ in range(START_ATTEMPTS):
            self._launch()
            if self._answers():
                return
            self.stop()
        log = self._log().read_text("utf-8", "replace")[-2000:]
        raise RuntimeError(f"{self.programs / 'rabbitmq-server'} did not start:\n{log}")

    def stop(self) -> None:
        """End first the server, then its port mapper, and wait until they are gone."""
        while self._processes:
            process = self._processes.pop()
            try:
                if process.poll() is None:
                    process.terminate()
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(STOP_TIMEOUT)
            finally:  # the Erlang machine is a child of the script that was started
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def restart(self) -> None:
        """Kill the server, and start it again with its data, on its port."""
        deadline = time.monotonic() + START_TIMEOUT
        while True:
            server = self._processes.pop()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()
            self._popen(*self._server)
            # Until it listens, a client's own end of a connection may have its port.
            if self._answers():
                return
            assert time.monotonic() < deadline, "the server did not start again"

    def control(self, *words: str) -> str:
        """Run rabbitmqctl with these words; return what it says."""
        command = [str(self.programs / "rabbitmqctl"), "--node", self.node, "--quiet", *words]
        return run(*command, env=self.env, cwd=self.folder).stdout

    @property
    def _server(self) -> tuple[str, ...]:
        return (str(self.programs / "rabbitmq-server"),)

    def _launch(self) -> None:
        self.port, distribution, mapper = (free_port() for _ in range(3))
        self._prepare(distribution, mapper)
        # Started here, for the node would leave a daemon behind.
        self._popen("epmd", "-port", str(mapper), "-address", LOOPBACK)
        deadline = time.monotonic() + START_TIMEOUT
        while not _listens(mapper) and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL)
        self._popen(*self._server)

    def _prepare(self, distribution: int, mapper: int) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        home = self.folder / "home"  # of the Erlang cookie
        home.mkdir(parents=True)
        name = self.node.partition("@")[0]
        (self.folder / "rabbitmq.conf").write_text(f"cluster_name = {name}\n", "ascii")
        (self.folder / "enabled_plugins").write_text("[].\n", "ascii")
        (self.folder / "env.conf").touch()  # in place of the system's
        foreign = ("RABBITMQ_", "ERL_")
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        self.env |= {
            "HOME": str(home),
            "ERL_EPMD_ADDRESS": LOOPBACK,
            "ERL_EPMD_PORT": str(mapper),
            "RABBITMQ_CONF_ENV_FILE": str(self.folder / "env.conf"),
            "RABBITMQ_CONFIG_FILE": str(self.folder / "rabbitmq.conf"),
            "RABBITMQ_DIST_PORT": str(distribution),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "enabled_plugins"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_LOG_BASE": str(self.folder / "log"),
            "RABBITMQ_MNESIA_BASE": str(self.folder / "data"),
            "RABBITMQ_NODENAME": self.node,
            "RABBITMQ_NODE_IP_ADDRESS": LOOPBACK,
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_PID_FILE": str(self.folder / "pid"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        }

    def _popen(self, *command: str) -> None:
        with self._log().open("ab") as log:
            self._processes.append(
                subprocess.Popen(
                    command,
                    env=self.env,
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def _answers(self) -> bool:
        """Wait until our own server answers: True; False if it ended, or takes too long."""
        deadline = time.monotonic() + START_TIMEOUT
        while all(process.poll() is None for process in self._processes):
            if _listens(self.port) and self._says_its_name():
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_INTERVAL)
        return False

    def _says_its_name(self) -> bool:
        connection = amqp.Connection(f"{LOOPBACK}:{self.port}", connect_timeout=KNOCK_TIMEOUT)
        try:
            connection.connect()
            return self.node.startswith(connection.server_properties["cluster_name"])
        except (OSError, AMQPError):
            return False  # still starting
        finally:
            with contextlib.suppress(OSError, AMQPError):
                connection.close()

    def _log(self) -> Path:
        return self.folder / "rabbitmq-server.log"


@contextlib.contextmanager
def running(programs: Path, folder: Path) -> Iterator[RabbitServer]:
    """Run one, and end it whatever happens."""
    rabbitmq = RabbitServer(programs, folder)
    try:
        rabbitmq.start()
        yield rabbitmq
    finally:
        rabbitmq.stop()


@contextlib.contextmanager
def own_rabbitmq(folder: Path) -> Iterator[RabbitServer]:
    """Run one for tests.  Where there is no RabbitMQ they are skipped; in CI they fail."""
    programs = find_rabbitmq()
    if programs is None:
        missing("RabbitMQ")
    with running(programs, folder) as rabbitmq:
        yield rabbitmq


def _listens(port: int) -> bool:
    with socket.socket() as knock:
        return knock.connect_ex((LOOPBACK, port)) == 0
