"""The lock server ``memory://``: fakeredis's TCP server, inside this process, on loopback.

It runs the scripts that a Redis runs, so there is no second implementation of a lock.  Other
processes can reach it at its port while this one lives.
"""

from __future__ import annotations

import select
import socket
import sys
import threading
import time
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from redis.exceptions import ResponseError

from celery_dislock.clock import monotonic

try:
    import lupa  # type: ignore[import-untyped] # noqa: F401 -- fakeredis needs it for scripts
    from fakeredis._clients._tcp_server import TCPFakeRequestHandler, TcpFakeServer
except ImportError as exc:
    remedy = "the server of tests needs fakeredis: pip install 'celery-dislock[testing]'"
    raise ImportError(f"{remedy} ({exc})") from exc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


HOST = "127.0.0.1"
INFO = b"redis_version:8.0.0\r\nrole:master\r\n"  # a command that fakeredis does not know


class Clock:
    """
    Stands for the module :mod:`time` in fakeredis, and can be *ahead* of it by some seconds.

    As the clock of a server, it goes on while a test has frozen Python's time.
    """

    def __init__(self) -> None:
        self.ahead = 0.0
        self._began = time.time() - monotonic()

    def time(self) -> float:
        """Return UNIX time plus the seconds that the clock is ahead."""
        return self._began + monotonic() + self.ahead

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


CLOCK = Clock()  # of every fakeredis of the process


class Connection(TCPFakeRequestHandler):
    """
    A client's connection.

    What blocks for a client that has gone takes nothing for it: fakeredis would lose a message.
    """

    disable_nagle_algorithm = True  # otherwise a reply of several parts takes 40 ms

    def setup(self) -> None:
        """Return errors as replies."""
        super().setup()
        client: Any = self.current_client
        read = client.read_response

        def read_response(*args: Any, **options: Any) -> Any:
            try:
                return read(*args, **options)
            except ResponseError as exc:
                if str(exc).startswith("unknown command 'info'"):
                    return INFO
                told, *_ = str(exc).partition("\nstack traceback:")
                exc.args = (" ".join(told.splitlines()),)  # the protocol's errors have one line
                return exc

        client.read_response = read_response
        self._take_nothing_for_the_dead(client.get_socket())

    def _take_nothing_for_the_dead(self, commands: Any) -> None:
        block = commands._blocking  # noqa: SLF001 -- of BLPOP and all that block

        def blocking(timeout: float | None, take: Callable[[bool], Any], *shape: Any) -> Any:
            def take_if_here(is_first: bool) -> Any:  # noqa: FBT001 -- fakeredis's
                readable, _, _ = select.select([self.connection], [], [], 0)
                if readable and not self.connection.recv(1, socket.MSG_PEEK):
                    raise ConnectionResetError
                return take(is_first)

            return block(timeout, take_if_here, *shape)

        commands._blocking = blocking  # noqa: SLF001


class MemoryServer(TcpFakeServer):
    """
    A lock server of this process, which listens at once.

    Args:
        port: Port to listen at; 0: a free one.

    Attributes:
        clock: Returns UNIX time, and the seconds by which :meth:`advance` has moved it.
        is_for_tests: Whether its data may be deleted.
        url: URL of its first database.
    """

    is_for_tests = True

    # Clients that may connect at once.  With the default of 5, others would wait for a second.
    request_queue_size = 128

    def __init__(self, port: int = 0) -> None:
        super().__init__((HOST, port))
        self.RequestHandlerClass = Connection
        self.daemon_threads = True
        self.clock = CLOCK.time
        self.url = f"redis://{HOST}:{self.server_address[1]}/0"
        self._away = False
        self._connected: WeakSet[socket.socket] = WeakSet()
        for name, module in list(sys.modules.items()):
            if name.startswith("fakeredis.") and vars(module).get("time") is time:
                vars(module)["time"] = CLOCK
        threading.Thread(target=self.serve_forever, name="dislock-memory", daemon=True).start()

    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ARG002
        """Take a connection, unless the server is away."""
        self._connected.add(request)
        return not self._away

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a connection that has broken."""

    def advance(self, seconds: float) -> None:
        """Let time pass; blocking commands look at the clock again."""
        CLOCK.ahead += seconds
        with self.fake_server.lock:
            for database in self.fake_server.dbs.values():
                database.condition.notify_all()

    @contextmanager
    def outage(self) -> Iterator[None]:
        """Close all connections, and new ones at once, while the block runs; the data stay."""
        self._away = True
        for connection in list(self._connected):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        try:
            yield
        finally:
            self._away = False


@cache
def memory_server(purpose: str = "locks") -> MemoryServer:  # noqa: ARG001 -- what it is cached by
    """Return a server of this process; the first call starts it.  A forked child uses it, too."""
    return MemoryServer()
