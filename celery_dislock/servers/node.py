"""One Redis process, as the lock server by itself or as a part of one.

Everything that is sent is safe to send twice, so a command whose reply was lost is simply sent
again on a fresh connection, a few times, before the server counts as away; but not after a
connection that took all of its time.  So is what was sent to one that says it is a replica: it was
the master once, and a fresh connection may lead to the one that is now.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, Protocol

import redis
from redis.exceptions import NoScriptError, RedisError

from celery_dislock.config.urls import without_password
from celery_dislock.exceptions import DamagedLockError, StoreError, UnreachableError
from celery_dislock.scripts import ACQUIRE, GRANTED, PARK, PARKED, RELEASE
from celery_dislock.scripts.names import KINDS
from celery_dislock.servers.connections import (
    AWAY,
    Answered,
    Silence,
    Wire,
    close,
    connect_within,
    connection_maker,
    locks_of,
    pack,
    store_error,
)
from celery_dislock.servers.pipeline import Batch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from celery_dislock.scripts import Script
    from celery_dislock.servers.connections import Command, Connect
    from celery_dislock.servers.pipeline import Call

RESENDS = 2  # times a command is sent again when its reply is lost
RESEND_PAUSE = 0.1  # seconds before the second resend; the first one follows at once
REPLICAS_WITHIN = 1.0  # seconds for the replicas to have an acquisition


class Watching(Protocol):
    """What knows which server is the master."""

    def confirm(self, connection: redis.Connection, within: float | None = None) -> None:
        """See that a connection leads to the master; else raise redis.ConnectionError."""

    def close(self) -> None:
        """Close the connections that it has to others."""


class Node:
    """One Redis process, and the connections to it.

    Safe to use from many threads or greenlets, but for the methods that end in ``_many``.

    Args:
        name: What errors call it.
        connect: Makes a connection; it need not connect yet.
        pause: Called with seconds to wait between two attempts.
        resends: Times a command is sent again when its reply is lost.
        min_replicas: An acquisition counts only when so many replicas have it.
        watched_by: Who says which server is the master; None: the one of the URL.
    """

    keeps_lines = True

    def __init__(
        self,
        name: str,
        connect: Connect,
        *,
        pause: Callable[[float], None] = time.sleep,
        resends: int = RESENDS,
        min_replicas: int = 0,
        watched_by: Watching | None = None,
    ) -> None:
        self.name = name
        self._connect = connect
        self._pause = pause
        self._resends = resends
        self._min_replicas = min_replicas
        self._watched_by = watched_by
        confirm = watched_by.confirm if watched_by else None
        self._wire = Wire(connect, confirm)
        self.batch = Batch(name, connect, confirm)

    def run(
        self,
        script: Script,
        keys: Sequence[str],
        *arguments: str | bytes | int,
        asking: bool = False,
    ) -> Any:
        """
        Run a script; blocks for a round trip, or a few where replies are lost.

        Args:
            script: The script.
            keys: The locks, all in one slot where this is a node of a cluster.
            arguments: Of the script.
            asking: They may be on its way to this node of a cluster; see ASK there.

        Returns:
            Its reply, strings as bytes.

        Raises:
            StoreError: No reply came, or an error; the script may have run, unless it is an
                UnreachableError.
        """
        return self.exchange(script, keys, *arguments, asking=asking)[0]

    def exchange(
        self,
        script: Script,
        keys: Sequence[str],
        *arguments: str | bytes | int,
        asking: bool = False,
    ) -> tuple[Any, bool]:
        """
        Run a script, see :meth:`run`; return its reply, and whether a reply before it was lost.

        In that case the script may have run before, and its reply tell what it found then.
        """
        before = (b"ASKING",) if asking else None
        then = self._await_replicas if self._min_replicas and script in {ACQUIRE, PARK} else None
        try:
            try:
                return self._exchange(script.by_digest(keys, *arguments), before, then)
            except NoScriptError:
                return self._exchange(script.by_text(keys, *arguments), before, then)
        except DamagedLockError as exc:
            exc.reason = self._wrong_kind(keys) or exc.reason
            exc.args = (exc.server, exc.reason, exc.lock)
            raise
        except _TooFewReplicas as exc:
            self.run(RELEASE, keys, arguments[0], 0, asking=asking)
            raise self._error(exc) from None

    def together(self, keys: Sequence[str]) -> list[Sequence[str]]:
        """Group keys, in their order, by what one script can be given: here all of them."""
        return [keys]

    def send(self, *command: str | bytes | int) -> Any:
        """
        Send a command; see :meth:`run`.

        Raises:
            StoreError: No reply came, or an error; the command may have been carried out.
        """
        try:
            return self._exchange(command)[0]
        except NoScriptError as exc:
            raise self._error(exc) from None

    def asks(self, key: str) -> list[Command]:
        """Return a form that does nothing of each command that is sent beside scripts."""
        waits: list[Command] = [(b"WAIT", 0, 0)] if self._min_replicas else []
        return [(b"BLPOP", key, b"no time"), *waits]

    def senders(self) -> list[Callable[..., Any]]:
        """Return what sends a command to each server that has locks: here one."""
        return [self.send]

    def _exchange(
        self,
        command: Command,
        before: tuple[bytes, ...] | None = None,
        then: Callable[[redis.Connection, Any], None] | None = None,
    ) -> tuple[Any, bool]:
        sent = self._resends == 0  # or it may have been sent before, by who resends it
        for attempt in range(1 + self._resends):
            connection = None
            try:
                connection = self._wire.connected()
                resent, sent = sent and attempt > 0, True
                sending = self._wire.send(connection, command, before)
                return self._wire.finish(sending, then), resent
            except (NoScriptError, _TooFewReplicas):
                raise
            except AWAY as exc:
                self._wire.close_idle()  # they are from before the server went away, too
                # A connection that takes all of its time is not tried again: it would again.
                too_slow = connection is None and isinstance(exc, redis.TimeoutError)
                if attempt == self._resends or too_slow:
                    error = self._error(exc)
                    raise (error if sent else _unreachable(error)) from None
                self._pause(attempt * RESEND_PAUSE)
            except RedisError as exc:
                raise store_error(self.name, exc, locks_of(command)) from None
        raise AssertionError("unreachable")  # pragma: no cover

    def _wrong_kind(self, locks: Sequence[str]) -> str:
        """Say which key of a lock is of a wrong type; empty where none is, or nobody tells."""
        with contextlib.suppress(StoreError):
            for key, kind in ((lock + end, kind) for lock in locks for end, kind in KINDS.items()):
                found = self.send(b"TYPE", key).decode()
                if found not in {kind, "none"}:
                    return f"{key!r} is a {found}, not a {kind}"
        return ""

    def _await_replicas(self, connection: redis.Connection, reply: Any) -> None:
        """See that replicas have what was granted or parked; WAIT is asked where it was written."""
        if reply[0] not in {GRANTED, PARKED}:
            return
        patience = min(REPLICAS_WITHIN, (connection.socket_timeout or REPLICAS_WITHIN * 2) / 2)
        wait = pack(connection, b"WAIT", self._min_replicas, int(patience * 1000))
        connection.send_packed_command(wait, check_health=False)
        have = connection.read_response()
        if have < self._min_replicas:
            raise _TooFewReplicas(
                f"only {have} of {self._min_replicas} replicas had the lock in "
                f"{patience:g} s; it was given back"
            )

    def pop(self, key: str, seconds: float, *, asking: bool = False) -> bytes | None:
        """
        Take an element from a list; blocks until there is one, *seconds* at most (BLPOP).

        Nothing is resent: what was taken may be lost with its reply, so ask the server what is.
        The time is measured here: a server that has nothing else to do ends a BLPOP up to a tenth
        of a second late.  The connection on which it had not answered by then is closed.

        Args:
            key: Name of the list.
            seconds: > 0, a fraction allowed.
            asking: See :meth:`run`.

        Returns:
            The element; None where there was none.

        Raises:
            StoreError: No reply came, or an error; an element may have been taken.
        """
        before = (b"ASKING",) if asking else None
        try:
            connection = self._wire.start((b"BLPOP", key, seconds), before)
            reply = self._wire.finish(connection, within=seconds)
        except Silence:
            return None
        except (RedisError, OSError) as exc:
            raise self._error(exc) from None
        return None if reply is None else reply[1]

    def run_many(self, script: Script, calls: Sequence[Call], *, within: float) -> list[Any]:
        """
        Run a script many times in one pipelined round trip, on a connection of its own.

        For one thread only, which has its own idea of when to try again: nothing is resent.

        Args:
            script: The script.
            calls: Key and arguments of each run.
            within: Seconds for the connection, where there is none yet, and for the first reply.

        Returns:
            The reply to each; a StoreError in place of the one that failed.

        Raises:
            StoreError: The server did not answer; each may have run or not.
        """
        self.batch.send(script, calls, within=within)
        return self.batch.read(script, calls, within=within)

    def ask(self, *command: str, within: float | None) -> Any:
        """
        Send a command on a connection of its own, once; it may take *within* seconds to answer.

        Raises:
            StoreError: No reply came, or an error.
        """
        connection: redis.Connection | None = None
        try:
            connection = connect_within(self._connect, within)
            connection.send_packed_command(pack(connection, *command), check_health=False)
            return connection.read_response(disable_decoding=True)
        except (RedisError, OSError) as exc:
            raise self._error(exc) from None
        finally:
            close(connection)

    def close(self) -> None:
        """Close the connections that are not in use."""
        self._wire.close_idle()
        self.batch.close()
        if self._watched_by:
            self._watched_by.close()

    def close_idle(self) -> None:
        """Close those that wait for a command; the batches keep theirs."""
        self._wire.close_idle()

    def _error(self, exc: Exception) -> StoreError:
        return store_error(self.name, exc)


def _unreachable(error: StoreError) -> UnreachableError:
    unreachable = UnreachableError(error.server, error.reason)
    unreachable.raw = error.raw
    return unreachable


class _TooFewReplicas(Answered):  # no error yet: the lock is given back first
    pass


def single(
    url: str, options: Mapping[str, Any], *, pause: Callable[[float], None], min_replicas: int = 0
) -> Node:
    """Return the one server of this URL."""
    name = without_password(url)
    make = connection_maker(name, url, options)
    return Node(name, lambda _within: make(), pause=pause, min_replicas=min_replicas)
