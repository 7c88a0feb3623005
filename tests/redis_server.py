"""A Redis server of a test: what the demo's can do, and to be killed, paused and restarted."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import redis

from celery_dislock.testing import redis_server

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


class Client(redis.Redis):
    """A client that closes its connections; redis-py 5.0.0 leaves them to the garbage collector."""

    def close(self) -> None:
        """Close the client, and its connections."""
        super().close()
        self.connection_pool.disconnect()


class RedisServer(redis_server.RedisServer):
    """One Redis server process, as a context manager.

    Args:
        folder: Where the server keeps its data and its log; made if it is not there.
        port: The loopback port; None takes a free one.
        unix_socket: Listen on a unix socket in a short temporary folder, and on no port.
        args: More options of redis-server, ``["--appendonly", "yes"]``; they win over the usual.
        environment: Its environment; None: that of this program.
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
        if unix_socket and port is not None:
            msg = "a server on a unix socket has no port"
            raise ValueError(msg)
        super().__init__(folder, unix_socket=unix_socket)
        self.port = port
        # A title would be written over its environment, by which tests.orphans knows the server.
        self._environment = environment
        self._args = ("--set-proc-title", "no", *args)

    def client(self, **options: Any) -> redis.Redis:
        """Return a new client of the server; *options* go to ``redis.Redis.from_url``."""
        client: redis.Redis = Client.from_url(self.url, **options)
        return client

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
