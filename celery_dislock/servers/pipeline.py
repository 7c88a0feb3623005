"""Many runs of one script in one pipelined round trip: how the watchdog renews its leases.

Each server has one connection for it, beside those of its other commands, with times of its own.
It is used by one thread only, which knows best when to try again: nothing is resent here.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, TypeVar

import redis
from redis.exceptions import NoScriptError, RedisError, ResponseError

from celery_dislock.exceptions import StoreError
from celery_dislock.redaction import Ours
from celery_dislock.servers.connections import AWAY, close, connect_within, pack, read, store_error

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from celery_dislock.scripts import Script
    from celery_dislock.servers.connections import Confirm, Connect

    Call = tuple[str | bytes | int, ...]


class NothingSent(Ours, redis.ConnectionError):
    """There is no connection on which a reply could come."""


LEAST = 0.05  # seconds for what must be asked when the time is used up

Key = TypeVar("Key")


class Batch:
    """
    What one server is asked in batches.

    Args:
        name: What errors call the server.
        connect: Makes a connection; it need not connect yet.
        confirm: See :class:`celery_dislock.servers.connections.Wire`.
    """

    def __init__(self, name: str, connect: Connect, confirm: Confirm | None = None) -> None:
        self._name = name
        self._connect = connect
        self._confirm = confirm
        self._connection: redis.Connection | None = None

    def send(self, script: Script, calls: Sequence[Call], *, within: float) -> None:
        """
        Ask; nothing may come before :meth:`read`.

        Args:
            script: The script.
            calls: Key and arguments of each run.
            within: Seconds for the connection, where there is none yet.

        Raises:
            StoreError: The server is away; each may have run or not.
        """
        with self._connected():
            if self._connection is None:
                self._connection = connect_within(self._connect, within)
            _send_all(self._connection, script, calls)

    def read(self, script: Script, calls: Sequence[Call], *, within: float) -> list[Any]:
        """
        Read what was asked for.

        Args:
            script: As sent.
            calls: As sent.
            within: Seconds for the first reply.

        Returns:
            The reply to each; a StoreError in place of the one that failed.

        Raises:
            StoreError: The server did not answer; each may have run or not.
        """
        with self._connected():
            connection = self._connection
            if connection is None:
                raise NothingSent("nothing was sent")
            replies = _read_all(connection, calls, within)
            unknown = [n for n, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
            if unknown:  # the first brings the script, for which EVAL is all that is needed
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


def ask_all(
    script: Script, batches: Mapping[Key, tuple[Batch, Sequence[Call]]], *, within: float
) -> tuple[dict[Key, list[Any]], set[Key]]:
    """
    Ask several servers at once: all are sent to, in this order, before the first reply is read.

    One that is away delays no other's answer, and all of them together take no longer than one;
    but to connect to one that is away may take all of the time, so those are to come last.

    Args:
        script: The script.
        batches: By whatever tells the servers apart, each one's batch and calls.
        within: Seconds until the first reply of each.

    Returns:
        The replies of each server, see :meth:`Batch.read`, and the servers that did not answer, for
        which one error stands in place of each reply.
    """
    until = time.monotonic() + within
    replies: dict[Key, list[Any]] = {}
    failed: dict[Key, StoreError] = {}
    for key, (batch, calls) in batches.items():
        try:
            batch.send(script, calls, within=max(until - time.monotonic(), LEAST))
        except StoreError as exc:
            failed[key] = exc
    for key, (batch, calls) in batches.items():
        if key not in failed:
            try:
                left = max(until - time.monotonic(), 0.0)
                replies[key] = batch.read(script, calls, within=left)
                continue
            except StoreError as exc:
                failed[key] = exc
        replies[key] = [failed[key]] * len(calls)
    return replies, set(failed)


def _send_all(
    connection: redis.Connection, script: Script, calls: Sequence[Call], *, bring: bool = False
) -> None:
    commands = [script.by_digest([key], *arguments) for key, *arguments in calls]
    if bring:
        key, *arguments = calls[0]
        commands[0] = script.by_text([key], *arguments)
    packed = [b"".join(pack(connection, *command)) for command in commands]
    connection.send_packed_command([b"".join(packed)], check_health=False)


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
