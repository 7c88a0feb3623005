"""One Redis process, as the lock server or as one node of it.

Scripts are safe to send twice.  If a reply is lost, the command is sent again on a fresh
connection, up to RESENDS times, before the server counts as away.  It is not sent again if the
attempt to connect timed out.

A command is also sent again if the server answers that it is a replica.  That server was the master
before, and a fresh connection may lead to the new master.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

import redis

from celery_dislock import scripts
from celery_dislock.exceptions import DamagedLockError, StoreError, UnreachableError
from celery_dislock.scripts.names import KEY_TYPES
from celery_dislock.servers.connections import (
    CONNECTION_ERRORS,
    Wire,
    by_digest,
    by_text,
    commands_of,
    only_reply,
    send_commands,
    store_error,
)
from celery_dislock.servers.server import Member, Server

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from celery_dislock.scripts import Script
    from celery_dislock.servers.connections import Call, Command, Connect, Connection
    from celery_dislock.servers.sentinel import Sentinels

# Scripts whose work replicas may have to confirm.
GRANT = {scripts.ACQUIRE, scripts.ACQUIRE_UNIQUE, scripts.PARK, scripts.PARK_UNIQUE}
ASKING = (b"ASKING",)
RESENDS = 2  # times a command is sent again if its reply is lost
RESEND_PAUSE = 0.1  # seconds before the second resend; the first one follows at once
REPLICAS_WITHIN = 1.0  # maximum seconds to wait until the replicas have an acquisition


class Node(Server):
    """One Redis process, and the connections to it.

    Safe to use from many threads or greenlets.

    Args:
        name: Name of the server in errors.
        connect: Makes a connection, which need not be connected yet.
        pause: Called with the seconds to wait between two attempts.
        resends: Times a command is sent again if its reply is lost.
        min_replicas: Number of replicas that must have an acquisition before it counts.
        watched_by: Knows which server is the master; None: the server of the URL is used.
    """

    def __init__(
        self,
        name: str,
        connect: Connect,
        pause: Callable[[float], None],
        *,
        resends: int = RESENDS,
        min_replicas: int = 0,
        watched_by: Sentinels | None = None,
    ) -> None:
        self.name = name
        self._pause = pause
        self._resends = resends
        self.min_replicas = min_replicas
        self._watched_by = watched_by
        self.kind = "sentinel" if watched_by else "single"
        confirm = watched_by.confirm if watched_by else None
        self.wire = Wire(name, connect, confirm)

    def exchange(
        self,
        script: Script,
        keys: Sequence[str],
        *arguments: str | bytes | int,
        asking: bool = False,
    ) -> tuple[Any, bool]:
        """
        Run a script; see :meth:`Server.exchange`.

        Args:
            script: The script.
            keys: The locks.  In a cluster, all must be in one slot.
            arguments: Arguments of the script.
            asking: Send ASKING first: the slot is being moved to this node of a cluster.  The
                script then goes by its text, since ASKING holds for one command.
        """
        is_acquisition = script is scripts.ACQUIRE
        undo = partial(by_text, scripts.RELEASE, keys, arguments[0], 0) if is_acquisition else None
        command = (by_text if asking else by_digest)(script, keys, *arguments)
        try:
            return self._exchange(command, script, asking=asking, undo=undo)
        except DamagedLockError as exc:
            exc.reason = self._wrong_kind(keys) or exc.reason
            exc.args = (exc.server, exc.reason, exc.lock)
            raise
        except _TooFewReplicasError:
            self.exchange(scripts.RELEASE, keys, arguments[0], 0, asking=asking)
            raise

    def send(self, *command: str | bytes | int) -> Any:
        """Send a command; see :meth:`Server.send`."""
        return self._exchange(command)[0]

    def watchers(self) -> list[tuple[str, str]]:
        """Return the Sentinels, and what is wrong with each; see :meth:`Sentinels.roll_call`."""
        return self._watched_by.roll_call() if self._watched_by else []

    def members(self) -> list[Member]:
        """Return this server; see :meth:`Server.members`."""
        return [Member(self.name, self.send, self.wire)]

    def _exchange(
        self,
        command: Command,
        script: Script | None = None,
        *,
        asking: bool = False,
        undo: Callable[[], Command] | None = None,
    ) -> tuple[Any, bool]:
        """Send a command, and again if its reply is lost; *script*: the script that it runs."""
        then = self._await_replicas if self.min_replicas and script in GRANT else None
        commands = (ASKING, command) if asking else (command,)
        sent = self._resends == 0  # the caller resends, and may have sent the command before
        attempt = 0
        while True:
            try:
                connection = self.wire.start(commands)
                reply = self.wire.finish(connection, commands, script, then=then, undo=undo)[-1]
            except StoreError as exc:
                unsent = isinstance(exc, UnreachableError)
                # A connection attempt that timed out is not repeated: the next would, too.
                too_slow = unsent and isinstance(exc.raw, redis.TimeoutError)
                sent = sent or not unsent
                if (
                    attempt == self._resends
                    or too_slow
                    or not isinstance(exc.raw, CONNECTION_ERRORS)
                ):
                    if sent and exc.raw:
                        raise store_error(self.name, exc.raw) from None
                    raise
            else:
                if isinstance(reply, StoreError):
                    raise reply
                return reply, sent and attempt > 0
            self._pause(attempt * RESEND_PAUSE)
            attempt += 1

    def _wrong_kind(self, locks: Sequence[str]) -> str:
        """Describe the key that has a wrong type; empty if none has, or no reply arrives."""
        with contextlib.suppress(StoreError):
            for key, kind in (
                (lock + end, kind) for lock in locks for end, kind in KEY_TYPES.items()
            ):
                found = self.send(b"TYPE", key).decode()
                if found not in {kind, "none"}:
                    return f"{key!r} is a {found}, not a {kind}"
        return ""

    def _await_replicas(self, connection: Connection, reply: Any) -> Any:
        """
        Wait until enough replicas have the lease or the parked task; return an error if not.

        WAIT covers the writes of its own connection, so it is sent on that connection.
        """
        if isinstance(reply, StoreError) or reply[0] not in {scripts.GRANTED, scripts.PARKED}:
            return reply
        patience = min(REPLICAS_WITHIN, (connection.socket_timeout or REPLICAS_WITHIN * 2) / 2)
        send_commands(connection, (b"WAIT", self.min_replicas, int(patience * 1000)))
        have = connection.read_response()
        if have >= self.min_replicas:
            return reply
        told = f"only {have} of {self.min_replicas} replicas had the lock in {patience:g} s"
        return _TooFewReplicasError(self.name, f"{told}; it was given back")

    def pop(self, key: str, seconds: float, *, asking: bool = False) -> bytes | None:
        """
        Take an element from a list (BLPOP).  Blocks for at most *seconds*.

        Nothing is resent: an element may have been taken and lost with the reply, so the caller
        must ask the server for the state of the lock.  The time is measured here, since an idle
        server ends a BLPOP up to 0.1 s late.  If no reply arrives in time, the connection is
        closed.

        Args:
            key: Name of the list.
            seconds: Seconds to wait, > 0, may be a fraction.
            asking: See :meth:`exchange`.

        Returns:
            The element; None if none arrived in time.

        Raises:
            StoreError: No reply arrived, or the reply is an error.  An element may have been taken.
        """
        command = (b"BLPOP", key, seconds)
        commands = (ASKING, command) if asking else (command,)
        connection = self.wire.start(commands)
        connection.set_patience(seconds)
        try:
            reply = only_reply(self.wire.finish(connection, commands, then=_reset_patience)[-1:])
        except StoreError as exc:
            if isinstance(exc.raw, redis.TimeoutError):
                return None
            raise
        return None if reply is None else reply[1]

    def run_many(self, script: Script, calls: Sequence[Call], *, within: float) -> list[Any]:
        """Run a script many times; see :meth:`Server.run_many`."""
        return self.wire.ask(commands_of(script, calls), script, within=within)

    def close(self) -> None:
        """Close the connections, those in use after their use."""
        self.wire.close()
        if self._watched_by:
            self._watched_by.close()


def _reset_patience(connection: Connection, reply: Any) -> Any:
    connection.reset_patience()
    return reply


class _TooFewReplicasError(StoreError):
    """The lease or the parked task is on the master, and on too few replicas."""
