"""
Run a RabbitMQ server of one's own, and end it again.

As with Redis, no test uses a server that happens to listen, and none is shared with the system's
own: node name, data, Erlang cookie, ports and even the Erlang port mapper belong to this server
alone, and all of them are on the loopback.  A server counts as started when it answers *and* says
the name that was given to it; between the choice of a free port and the bind, another process can
take it.
"""

from __future__ import annotations

import atexit
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
import pytest
from amqp.exceptions import AMQPError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from typing_extensions import Self

START_TIMEOUT = 90.0  # seconds until a new server must answer
STOP_TIMEOUT = 15.0  # seconds after SIGTERM until SIGKILL
COMMAND_TIMEOUT = 60.0  # seconds that a command to a running server may take
KNOCK_TIMEOUT = 5.0  # seconds that a server which accepts connections may take to answer
POLL_INTERVAL = 0.05  # seconds between two looks at a starting server
START_ATTEMPTS = 5  # sets of free ports tried, should others keep taking one
PACKAGED = Path("/usr/lib/rabbitmq/bin")  # a package's own programs: those on PATH change the user
PORT_TAKEN = ("in use", "eaddrinuse")  # what is said where a port was
LOOPBACK = "127.0.0.1"


class RabbitMissing(RuntimeError):  # noqa: N818  # reads as what is the case
    """There is no rabbitmq-server here: install RabbitMQ."""


class RabbitFailed(RuntimeError):  # noqa: N818  # as RabbitMissing
    """A rabbitmq-server was found, but did not start or obey."""


def find_rabbitmq() -> Path:
    """
    Return the folder of rabbitmq-server and rabbitmqctl.  Starts nothing.

    Raises:
        RabbitMissing: They are not there, or no epmd beside them.
    """
    if not shutil.which("epmd"):
        raise RabbitMissing("no epmd on PATH: install RabbitMQ and Erlang")
    if (PACKAGED / "rabbitmq-server").exists():
        return PACKAGED
    if found := shutil.which("rabbitmq-server"):
        return Path(found).parent
    raise RabbitMissing("no rabbitmq-server on PATH: install RabbitMQ")


class RabbitServer:
    """
    One RabbitMQ node without plugins, as a context manager.

    Entering starts it and waits until it answers; leaving ends it and its port mapper, whatever
    happened inside.  It asks for no user: root's server runs as root.

    Args:
        folder: Where the server keeps its data, its cookie and its log; made if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder).resolve()
        self.node = f"dislock-{uuid.uuid4().hex[:8]}@localhost"
        self.port = 0
        self._programs = Path()
        self._env: dict[str, str] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._starter: int | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The server's default virtual host."""
        return self._url("/")

    def start(self) -> Self:
        """
        Start the server and wait until it answers.

        Raises:
            RabbitMissing: There is no RabbitMQ on this machine.
            RabbitFailed: It ended, or did not answer within `START_TIMEOUT`; none is left.
        """
        self._programs = find_rabbitmq()
        self._starter = os.getpid()
        atexit.register(self.stop)
        try:
            for _ in range(START_ATTEMPTS):
                self._launch()
                if self._answers():
                    return self
                self._end_processes()
                if not any(words in self._log_text() for words in PORT_TAKEN):
                    break
        except BaseException:
            self.stop()
            raise
        self.stop()
        msg = f"{self._programs / 'rabbitmq-server'} did not start:\n{self._log_text()[-2000:]}"
        raise RabbitFailed(msg)

    def stop(self) -> None:
        """End the server and its port mapper, and wait until they are gone."""
        if self._starter != os.getpid():
            return  # a fork of the program that started it: the server is not ours to end
        atexit.unregister(self.stop)
        self._end_processes()

    def add_virtual_host(self, name: str) -> str:
        """Make a virtual host, which has queues and connections of its own; return its URL."""
        self._control("add_vhost", name)
        self._control("set_permissions", "-p", name, "guest", ".*", ".*", ".*")
        return self._url(name)

    def close_connections(self, name: str) -> None:
        """Close all connections to a virtual host, as an operator or a failing network does."""
        self._control("close_all_connections", "--vhost", name, "a test wants it")

    def _url(self, virtual_host: str) -> str:
        return f"amqp://guest:guest@{LOOPBACK}:{self.port}/{virtual_host}"

    def _control(self, *words: str) -> None:
        command = [str(self._programs / "rabbitmqctl"), "--node", self.node, "--quiet", *words]
        done = subprocess.run(
            command,
            env=self._env,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT,
            check=False,
        )
        if done.returncode:
            raise RabbitFailed(f"{' '.join(command)}: {done.stdout}{done.stderr}")

    def _launch(self) -> None:
        self.port, distribution, mapper = _free_ports(3)
        self._prepare(distribution, mapper)
        with (self.folder / "epmd.log").open("wb") as log:
            # Started here, for the node would leave a daemon behind.
            epmd = ["epmd", "-port", str(mapper), "-address", LOOPBACK]
            self._processes.append(self._popen(epmd, log))
        deadline = time.monotonic() + START_TIMEOUT
        while not _listens(mapper) and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL)
        with self._log().open("wb") as log:
            server = [str(self._programs / "rabbitmq-server")]
            self._processes.append(self._popen(server, log))

    def _prepare(self, distribution: int, mapper: int) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        home = self.folder / "home"  # of the Erlang cookie
        home.mkdir(parents=True)
        name = self.node.partition("@")[0]
        (self.folder / "rabbitmq.conf").write_text(f"cluster_name = {name}\n", "ascii")
        (self.folder / "enabled_plugins").write_text("[].\n", "ascii")
        (self.folder / "env.conf").touch()  # in place of the system's
        foreign = ("RABBITMQ_", "ERL_")
        self._env = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        self._env |= {
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

    def _popen(self, command: list[str], log: object) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                command,
                env=self._env,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as exc:
            raise RabbitFailed(f"{command[0]} cannot be run: {exc}") from exc

    def _end_processes(self) -> None:
        """End first the server, then its port mapper."""
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

    def _answers(self) -> bool:
        """Wait until our own server answers: True; False where it ended, or takes too long."""
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

    def _log_text(self) -> str:
        logs = (self.folder / "epmd.log", self._log())
        return "".join(log.read_text("utf-8", "replace") for log in logs if log.exists())


@contextlib.contextmanager
def own_rabbitmq(folder: Path) -> Iterator[RabbitServer]:
    """Run one for tests.  Where there is no RabbitMQ they are skipped; in CI they fail."""
    try:
        find_rabbitmq()
    except RabbitMissing as exc:
        if os.environ.get("CI"):
            pytest.fail(f"CI must have RabbitMQ: {exc}", pytrace=False)
        pytest.skip(str(exc))
    with RabbitServer(folder) as rabbitmq:
        yield rabbitmq


def _listens(port: int) -> bool:
    with socket.socket() as knock:
        return knock.connect_ex((LOOPBACK, port)) == 0


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind((LOOPBACK, 0))
        return [probe.getsockname()[1] for probe in probes]
