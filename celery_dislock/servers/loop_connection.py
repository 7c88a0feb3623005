"""Connections of event loops: redis-py's for asyncio, with the methods of its blocking ones.

redis-py connects and logs in.  Then this module reads from the transport itself, without streams:
that takes half the time.  Code that waits does so through :mod:`celery_dislock.servers.bridge`.
Sending never waits: commands are short, and the transport keeps what the socket does not take.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import redis
from redis.asyncio import Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from celery_dislock.clock import FOREVER
from celery_dislock.redaction import Ours
from celery_dislock.servers.bridge import current_call, sleep, wait_for
from celery_dislock.servers.connecting import Driver, reply_reader
from celery_dislock.servers.connections import INCOMPLETE, PUSHED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LOOP_KINDS = {
    redis.Connection: Connection,
    redis.SSLConnection: SSLConnection,
    redis.UnixDomainSocketConnection: UnixDomainSocketConnection,
}


class NoCoroutineError(Ours, redis.RedisError):
    """No coroutine uses an async lock here."""


class LoopConnection(asyncio.Protocol):
    """
    A connection that belongs to the event loop on which it connects.

    Args:
        kind: A class of redis-py's blocking connections.
        arguments: Its keyword arguments.

    Attributes:
        host, port: Where it leads to; None for a unix socket.
        socket_timeout: Seconds to wait for a reply; None: no limit.
        socket_connect_timeout: Seconds to connect; None: no limit.
    """

    def __init__(self, kind: type[redis.Connection], arguments: Mapping[str, Any]) -> None:
        self._redis: Any = LOOP_KINDS[kind](**{**arguments, "retry": Retry(NoBackoff(), 0)})
        self.host, self.port = arguments.get("host"), arguments.get("port")
        self.socket_timeout: float | None = self._redis.socket_timeout
        self.socket_connect_timeout: float | None = self._redis.socket_connect_timeout
        self._patience = self.socket_timeout  # for each reply
        self._replies = reply_reader()
        self._transport: Any = None
        self._arrives: asyncio.Future[None] | None = None
        self._lost: redis.ConnectionError | None = redis.ConnectionError("it is not connected")

    @property
    def _sock(self) -> Any:
        return self._transport  # None: it is closed

    def set_patience(self, seconds: float) -> None:
        """Wait *seconds* for each reply, for now."""
        self._patience = seconds

    def reset_patience(self) -> None:
        """Wait *socket_timeout* seconds for each reply."""
        self._patience = self.socket_timeout

    def connect(self) -> None:
        """Connect; raises redis-py's errors."""
        _require_coroutine()
        call = current_call()
        if call is not None and call.stopped_by is not None:  # perhaps its event loop is closed
            raise call.stopped_by
        self._loop = asyncio.get_running_loop()
        self._redis.socket_connect_timeout = self.socket_connect_timeout
        self._redis.socket_timeout = self._patience = self.socket_timeout
        # In a task of its own: before Python 3.12, redis-py hides a cancellation at some steps.
        connects = asyncio.ensure_future(self._redis.connect())
        try:
            wait_for(asyncio.shield(connects))
        except BaseException:
            connects.cancel()
            connects.add_done_callback(self._give_up)
            raise
        self._transport = self._redis._writer.transport  # noqa: SLF001
        self._transport.set_protocol(self)
        self._lost = None

    def _give_up(self, connects: asyncio.Future[None]) -> None:
        """Close the connection that a connecting which was given up may still have made."""
        if not connects.cancelled():
            connects.exception()  # otherwise asyncio logs that it was never retrieved
        if self._redis._writer is not None:  # noqa: SLF001
            self._redis._writer.transport.abort()  # noqa: SLF001 -- TLS would wait for an answer
        self.disconnect()

    def send_packed_command(self, command: Sequence[bytes], *, check_health: bool = False) -> None:  # noqa: ARG002
        """Send packed commands; waits only if it has to connect first."""
        _require_coroutine()
        if self._transport is None:
            self.connect()  # as redis-py does
        if self._lost is not None:
            raise self._lost
        self._transport.write(b"".join(command))

    def read_response(self, **_options: bool) -> Any:
        """Return a reply, strings as bytes; raises redis-py's errors."""
        while (reply := self._replies.gets()) is INCOMPLETE or isinstance(reply, PUSHED):
            if reply is not INCOMPLETE:
                continue
            if self._lost is not None:
                raise self._lost
            if self._loop.is_closed():
                raise redis.ConnectionError("its event loop is closed")
            arrives = self._arrives = self._loop.create_future()
            patience = FOREVER if self._patience is None else self._patience
            timer = self._loop.call_later(patience, self._give_up_waiting)
            try:
                wait_for(arrives)
            finally:
                timer.cancel()
                self._arrives = None
        if isinstance(reply, redis.RedisError):
            raise reply
        return reply

    def _give_up_waiting(self) -> None:
        if self._arrives is not None and not self._arrives.done():
            self._arrives.set_exception(redis.TimeoutError("no answer in time"))

    def data_received(self, data: bytes) -> None:
        """Keep what arrives; the event loop calls this."""
        self._replies.feed(data)
        if self._arrives is not None and not self._arrives.done():
            self._arrives.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wake the reader, as nothing arrives any more; the event loop calls this."""
        self._lost = redis.ConnectionError(str(exc or "Connection closed by server."))
        self.data_received(b"")

    def disconnect(self) -> None:
        """Close the connection after all is sent; does not wait, and any thread may call it."""
        writer = self._redis._writer  # noqa: SLF001 -- its own method waits
        if writer is not None:
            self._transport = self._redis._reader = self._redis._writer = None  # noqa: SLF001
            self._redis._parser.on_disconnect()  # noqa: SLF001
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(writer.close)


def _require_coroutine() -> None:
    if current_call() is None:
        told = "its connections are those of an event loop: await the async lock's own methods"
        raise NoCoroutineError(told)


class LoopMutex:
    """A mutex of the tasks of one event loop; not reentrant."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    def acquire(self, *, timeout: float = -1) -> bool:  # noqa: ARG002 -- its owner has a limit
        """Wait for the mutex."""
        return wait_for(self._lock.acquire())

    def release(self) -> None:
        """Release the mutex."""
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_exc_info: object) -> None:
        self.release()


ON_LOOP = Driver(sleep, LoopConnection, LoopMutex)
