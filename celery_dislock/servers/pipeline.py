"""Run one script many times in one pipelined round trip, as the watchdog does to renew leases.

Each server has a separate connection for these batches, with its own timeouts.  Only one thread
uses it.  Nothing is resent here, since that thread decides when to try again.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, TypeVar

import redis
from redis.exceptions import NoScriptError, RedisError, ResponseError

from celery_dislock.clock import monotonic
from celery_dislock.exceptions import StoreError
from celery_dislock.redaction import Ours
from celery_dislock.servers.connections import (
    AWAY,
    by_digest,
    close,
    connect_within,
    packed,
    read,
    store_error,
    with_text,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from celery_dislock.scripts import Script
    from celery_dislock.servers.connections import Command, Confirm, Connect

    Call = tuple[str | bytes | int, ...]


class NothingSent(Ours, redis.ConnectionError):
    """There is no connection, so no reply can arrive."""


LEAST = 0.05  # seconds for a request that is sent although the time is used up

Key = TypeVar("Key")
Sent = TypeVar("Sent")


class Batch:
    """
    The batches that are sent to one server, on one connection.

    Args:
        name: Name of the server in errors.
        connect: Makes a connection, which need not be connected yet.
        confirm: See :class:`celery_dislock.servers.connections.Wire`.
    """

    def __init__(self, name: str, connect: Connect, confirm: Confirm | None = None) -> None:
        self._name = name
        self._connect = connect
        self._confirm = confirm
        self._connection: redis.Connection | None = None

    def send(self, script: Script, calls: Sequence[Call], *, within: float) -> None:
        """
        Send the calls.  :meth:`read` must follow before anything else is sent.

        Args:
            script: The script.
            calls: Key and arguments of each call.
            within: Seconds to connect if there is no connection yet.

        Raises:
            StoreError: The server is away.  Each call may have run or not.
        """
        with self._connected():
            if self._connection is None:
                self._connection = connect_within(self._connect, within)
            _send_all(self._connection, script, calls)

    def read(self, script: Script, calls: Sequence[Call], *, within: float) -> list[Any]:
        """
        Read the replies to the calls that were sent.

        Args:
            script: The script that was sent.
            calls: The calls that were sent.
            within: Seconds for the first reply.

        Returns:
            The reply to each call, or a StoreError if the reply is an error.

        Raises:
            StoreError: The server did not answer.  Each call may have run or not.
        """
        with self._connected():
            connection = self._connection
            if connection is None:
                raise NothingSent("nothing was sent")
            replies = _read_all(connection, calls, within)
            unknown = [n for n, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
            if unknown:  # the first is sent again as EVAL, which loads the script for the others
                again = [calls[number] for number in unknown]
                _send_all(connection, script, again, bring=True)
                answers = _read_all(connection, again, within)
                for number, reply in zip(unknown, answers, strict=True):
                    replies[number] = reply
            if self._confirm:
                self._confirm(connection, within)
        return [
            store_error(self._name, reply, [str(key)]) if isinstance(reply, Exception) else reply
            for reply, (key, *_) in zip(replies, calls, strict=True)
        ]

    def ask(self, commands: Sequence[Command]) -> list[Any]:
        """
        Send any commands, once, with the timeouts of the connection's options.

        Returns:
            The reply to each, or a StoreError if the reply is an error.

        Raises:
            StoreError: The server did not answer.  Each command may have run or not.
        """
        with self._connected():
            connection = self._connection = self._connection or self._connect(None)
            _send_packed(connection, commands)
            replies = [_read_one(connection) for _ in commands]
            if self._confirm:
                self._confirm(connection, None)
        return [
            store_error(self._name, reply) if isinstance(reply, Exception) else reply
            for reply in replies
        ]

    def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        close(connection)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[None]:
        try:
            yield
        except BaseException as exc:
            self.close()
            if isinstance(exc, (RedisError, OSError)):
                raise store_error(self._name, exc) from None
            raise


def ask_each(
    servers: Iterable[Key],
    send: Callable[[Key, float], Sent],
    read: Callable[[Key, Sent, float], Any],
    *,
    within: float,
    clock: Callable[[], float] = monotonic,
) -> dict[Key, Any]:
    """
    Ask several servers at once.

    All are sent to, in this order, before the first reply is read.  So all servers together take no
    longer than one, and one that is away does not delay the others.  But connecting to a server
    that is away may use up half of the time that is left: such servers should come last.

    Args:
        servers: What identifies each server.
        send: Sends to a server, within these seconds.
        read: Reads the reply, given also what *send* has returned, within these seconds.
        within: Seconds for all servers together.
        clock: Monotonic clock in seconds.

    Returns:
        The reply of each server, or the StoreError that *send* or *read* has raised.
    """
    until = clock() + within
    sent: dict[Key, Sent] = {}
    replies: dict[Key, Any] = {}
    try:
        for server in servers:
            try:
                # Half of the time left, so that a server that is away leaves some for the others.
                sent[server] = send(server, max((until - clock()) / 2, LEAST))
            except StoreError as exc:
                replies[server] = exc
        for server in list(sent):
            try:
                replies[server] = read(server, sent.pop(server), max(until - clock(), 0.0))
            except StoreError as exc:
                replies[server] = exc
    except BaseException:  # an interruption; nobody else would read what the others reply
        for server, one in sent.items():
            with contextlib.suppress(BaseException):
                read(server, one, 0.0)
        raise
    return replies


def ask_all(
    script: Script, batches: Mapping[Key, tuple[Batch, Sequence[Call]]], *, within: float
) -> dict[Key, Any]:
    """
    Run a script on several servers at once; see :func:`ask_each`.

    Args:
        script: The script.
        batches: Batch and calls of each server, under what identifies the server.
        within: Seconds until the first reply of each server.

    Returns:
        The replies of each server, see :meth:`Batch.read`, or a StoreError if it did not answer.
    """

    def send(server: Key, left: float) -> None:
        batch, calls = batches[server]
        batch.send(script, calls, within=left)

    def read(server: Key, _sent: None, left: float) -> list[Any]:
        batch, calls = batches[server]
        return batch.read(script, calls, within=left)

    return ask_each(batches, send, read, within=within)


def _send_all(
    connection: redis.Connection, script: Script, calls: Sequence[Call], *, bring: bool = False
) -> None:
    commands = [by_digest(script, [str(key)], *arguments) for key, *arguments in calls]
    if bring:
        commands[0] = with_text(commands[0], script)
    _send_packed(connection, commands)


def _send_packed(connection: redis.Connection, commands: Sequence[Command]) -> None:
    connection.send_packed_command([b"".join(map(packed, commands))], check_health=False)


def _read_all(connection: redis.Connection, calls: Sequence[Call], within: float) -> list[Any]:
    first = _read_one(connection, within)
    return [first, *(_read_one(connection) for _ in calls[1:])]


def _read_one(connection: redis.Connection, within: float | None = None) -> Any:
    try:
        return read(connection, within)
    except AWAY:
        raise
    except ResponseError as exc:
        return exc
