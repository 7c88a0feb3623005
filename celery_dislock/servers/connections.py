"""Make, keep and use the connections to one Redis process.

Connections are redis-py's, and each carries one command at a time.  redis-py's client and pool are
not used, since they cost more time per command than the command itself.  Idle connections are kept
on a stack.  Their number never exceeds the largest number of commands that ran at the same time.
After any error, also an exception raised by a signal handler, the connection is closed and never
used again: the next reply on it could belong to the previous command.
"""

from __future__ import annotations

import contextlib
import re
import select
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import hiredis
import redis
from redis.exceptions import (
    AskError,
    ClusterDownError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from celery_dislock.exceptions import DamagedLockError, ForbiddenError, StoreError
from celery_dislock.redaction import Ours, reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from celery_dislock.scripts import Script

    Command = tuple[str | bytes | float, ...]
    # Given the seconds to find the server; None: the timeout in the options.
    Connect = Callable[[float | None], redis.Connection]
    # Given a connection and the seconds for the check; raises redis.ConnectionError.
    Confirm = Callable[[redis.Connection, float | None], None]

SOCKET_TIMEOUT = 2.0  # seconds to wait for a reply, and to connect

CLUSTER_ERRORS = {  # redis-py 5 raises them as plain ResponseError
    "ASK": AskError,
    "CLUSTERDOWN": ClusterDownError,
    "MOVED": MovedError,
    "TRYAGAIN": TryAgainError,
}

# Errors of a script that finds a key of the wrong type, or a record that it cannot read.
DAMAGE = re.compile(r"WRONGTYPE|dislock: |is not an integer|(?<!@)user_script:\d+: ")
# Text to remove from such an error: what Redis adds, before 7.0 in front of it and since 7.0 after
# it, and the prefix that the scripts write.
AROUND = re.compile(
    r"^Error running script \(.*?\): (@?user_script:\d+: )*|dislock: "
    r"| script: \w+, on @user_script.*$"
)
# Part of the error of a script that misses a key because the slot is being moved.
ON_ANOTHER_NODE = "attempted to access a non local key"

NUMBERS = {int, float, bool}  # types of what is packed as text

# Errors which mean that the server is away: redis-py's, and an OSError that redis-py passes on.
AWAY = (redis.ConnectionError, redis.TimeoutError, OSError)


def by_digest(script: Script, keys: Sequence[str], *arguments: str | bytes | float) -> Command:
    """Return the command that runs a script if the server has cached it."""
    return (b"EVALSHA", script.sha, len(keys), *keys, *arguments)


def by_text(script: Script, keys: Sequence[str], *arguments: str | bytes | float) -> Command:
    """Return the command that sends and runs a script; the server then caches it."""
    return with_text(by_digest(script, keys, *arguments), script)


def with_text(command: Command, script: Script) -> Command:
    """Return what :func:`by_text` returns, given what :func:`by_digest` has returned."""
    return (b"EVAL", script.text, *command[2:])


def packed(command: Command) -> bytes:
    """
    Return a command as it is sent, its numbers as text.

    hiredis 3.5 can crash the process if a signal handler raises while hiredis packs an int.
    """
    parts: Any = [str(part) if part.__class__ in NUMBERS else part for part in command]
    sent: bytes = hiredis.pack_command(tuple(parts))
    return sent


def send(connection: redis.Connection, *command: str | bytes | float) -> None:
    """Send a command on a connection, which connects first if it is not connected."""
    connection.send_packed_command((packed(command),), check_health=False)


class _Packer:
    """Pack what redis-py sends by itself, as :func:`packed` does; it may have several words."""

    def __init__(self, packer: Any) -> None:
        self._pack = packer.pack

    def pack(self, *command: Any) -> Any:
        return self._pack(*[str(part) if part.__class__ in NUMBERS else part for part in command])


def blocking_connection(
    kind: type[redis.Connection], arguments: Mapping[str, Any]
) -> redis.Connection:
    """Make one of redis-py's connections, which blocks."""
    connection = kind(**arguments)
    connection._command_packer = _Packer(connection._command_packer)  # noqa: SLF001
    return connection


class Mutex(Protocol):
    """A mutex, as :mod:`threading` has them."""

    def acquire(self, *, timeout: float = ...) -> bool:
        """Take it; return False if it was not free within these seconds."""

    def release(self) -> None:
        """Give it back."""

    def __enter__(self) -> Any: ...

    def __exit__(self, kind: Any, exc: Any, trace: Any, /) -> Any: ...  # noqa: PYI036 -- its types differ


class Driver(NamedTuple):
    """
    A way to wait.

    Attributes:
        pause: Called with the seconds to wait between two attempts.
        connection: Makes a connection, which need not be connected yet, given a class of redis-py's
            and its keyword arguments.  It has the methods of that class that are used here.
        mutex: Makes a mutex; who has it may wait.
    """

    pause: Callable[[float], None] = time.sleep
    connection: Callable[[type[redis.Connection], Mapping[str, Any]], redis.Connection] = (
        blocking_connection
    )
    mutex: Callable[[], Mutex] = threading.RLock


BLOCKING = Driver()


class Answered(Ours):  # like NoScriptError: the connection can still be used
    """The server answered, but not with the wanted result."""


class Silence(Ours, redis.TimeoutError):
    """No reply began to arrive in time; the connection is still open."""


class Demoted(Ours, redis.ConnectionError):
    """The server answered that it is a replica."""


class Wire:
    """
    The connections to one Redis process.  Safe to use from many threads or greenlets.

    Failures are raised as redis-py's errors.

    Args:
        connect: Makes a connection, which need not be connected yet.
        confirm: Checks, after each reply, that the connection leads to the right server.
    """

    def __init__(self, connect: Connect, confirm: Confirm | None = None) -> None:
        self._connect = connect
        self._confirm = confirm
        self._idle: list[redis.Connection] = []
        self._closed = False

    def start(
        self, command: Command, *, asking: bool = False, within: float | None = None
    ) -> redis.Connection:
        """
        Send a command; :meth:`finish` reads the reply.

        Args:
            command: The command.
            asking: See :meth:`send`.
            within: Seconds to connect if no connection is idle; None: the timeout in the options.

        Returns:
            The connection, for :meth:`finish`.
        """
        connection = self.connected(within)
        self.send(connection, command, asking=asking)
        return connection

    def connected(self, within: float | None = None) -> redis.Connection:
        """
        Return a connection for :meth:`send`: an idle one, or a new one that is connected first.

        Args:
            within: Seconds to connect; None: the timeout in the options.
        """
        try:
            idle = self._idle.pop()
        except IndexError:
            idle = None
        if idle is not None:
            return idle
        connection = connect_within(self._connect, within)
        try:
            connection.connect()
        except BaseException:
            close(connection)
            raise
        return connection

    def send(self, connection: redis.Connection, command: Command, *, asking: bool = False) -> None:
        """
        Send a command on this connection.

        Args:
            connection: What :meth:`connected` has returned.
            command: The command.
            asking: Send ASKING first: its slot is being moved to this node of a cluster.
        """
        try:
            if asking:
                send(connection, b"ASKING")
                connection.read_response()
            connection.send_packed_command((packed(command),), check_health=False)
        except BaseException:
            close(connection)
            raise

    def finish(
        self,
        connection: redis.Connection,
        then: Callable[[redis.Connection, Any], None] | None = None,
        *,
        within: float | None = None,
        undo: Callable[[], Command] | None = None,
    ) -> Any:
        """
        Read the reply to a command.

        Args:
            connection: The connection on which the command was sent.
            then: Called with the connection and the reply, for further commands on it.
            within: Seconds until the reply begins to arrive; None: the connection's timeout.
            undo: Returns a command to send if no reply begins to arrive, or a cancellation on an
                event loop interrupts this call.  The server may still run the first command at any
                later time, and runs that one after it.

        Returns:
            The reply, strings as bytes.
        """
        is_clean = False  # a reply may still come
        try:
            reply = read(connection, within)
            if self._confirm:
                self._confirm(connection, None)
            if then:
                then(connection, reply)
            is_clean = True
        except (NoScriptError, Answered):
            is_clean = True
            raise
        except BaseException as exc:
            breaks_off = isinstance(exc, Silence) or not isinstance(exc, (RedisError, OSError))
            # redis-py may have closed it.  To connect again would wait, and come in any order.
            if undo and breaks_off and connection._sock is not None:  # noqa: SLF001 -- no other way
                with contextlib.suppress(RedisError, OSError):
                    send(connection, *undo())
            close(connection)
            raise
        finally:
            if is_clean:
                self._idle.append(connection)
                if self._closed:
                    self.close_idle()
        return reply

    def close(self) -> None:
        """Close the idle connections, and from now on each one after its use."""
        self._closed = True
        self.close_idle()

    def close_idle(self) -> None:
        """Close the idle connections."""
        with contextlib.suppress(IndexError):  # other threads take from the stack, too
            while True:
                self._idle.pop().disconnect()


def connect_within(connect: Connect, within: float | None) -> redis.Connection:
    """Make a connection with *within* seconds to connect, and for each reply."""
    connection = connect(within)
    if within is not None:
        connection.socket_connect_timeout = connection.socket_timeout = within
    return connection


def read(connection: redis.Connection, within: float | None = None) -> Any:
    """
    Read a reply, strings as bytes.

    Args:
        connection: The connection on which a command was sent.
        within: Seconds until the reply begins to arrive; None: the connection's timeout.

    Raises:
        Silence: No reply began to arrive in time.
        redis.RedisError: The reply is an error, or the connection broke.
    """
    if within is not None and not _can_read(connection, within):
        raise Silence(f"no reply within {within:.2f} s")
    try:
        return connection.read_response(disable_decoding=True)
    except ResponseError as exc:
        if demoted(exc):
            raise Demoted("it is a replica, and no longer the master") from exc
        code, _, told = str(exc).partition(" ")
        if ON_ANOTHER_NODE in str(exc):
            raise TryAgainError("its slot is being moved to another node of the cluster") from exc
        if code in CLUSTER_ERRORS and type(exc) is ResponseError:  # redis-py 5
            raise CLUSTER_ERRORS[code](told) from exc
        raise


def _can_read(connection: redis.Connection, within: float) -> bool:
    """Return whether a reply begins to arrive within this time, in seconds."""
    try:
        return bool(connection.can_read(timeout=within))
    except AttributeError:
        if hasattr(select, "poll") or "eventlet.patcher" not in sys.modules:
            raise
    # Eventlet came after redis-py's import and took away select.poll, which redis-py looks up anew.
    from eventlet.patcher import original  # noqa: PLC0415 -- optional

    sock: Any = connection._sock  # noqa: SLF001 -- redis-py has no other way
    if hasattr(sock, "pending") and sock.pending():  # TLS
        return True
    ready = original("select").poll()
    ready.register(sock, select.POLLIN)
    return bool(ready.poll(within * 1000))


def demoted(exc: BaseException) -> bool:
    """
    Tell whether the server answered that it is a replica.

    Before Redis 7, the code READONLY is not at the start of a script's error.
    """
    return isinstance(exc, redis.ReadOnlyError) or (
        isinstance(exc, ResponseError) and "READONLY" in str(exc)
    )


def is_answer(error: StoreError) -> bool:
    """Tell whether the error is the server's reply.  If not, the server counts as away."""
    return isinstance(error.raw, ResponseError)


class Outage:
    """The outage of a server, if there is one: notices when it begins and ends, to log it once."""

    def __init__(self) -> None:
        self._lasts = False
        self._refuses = False  # while it lasts: the server answers, with an error

    def begins(self, error: Exception | None = None) -> bool:
        """Take note of a failure, and of its error; return whether it is the first in a row."""
        self._refuses = isinstance(error, StoreError) and is_answer(error)
        first, self._lasts = not self._lasts, True
        return first

    def ends(self, *, took: bool = True) -> bool:
        """
        Take note of an answer; return whether that ends an outage.

        Args:
            took: Whether something free was taken.  If not, a server that refused it may still do
                so: one without memory answers what it reads, and goes on with what it has.
        """
        ends = self._lasts and (took or not self._refuses)
        self._lasts = self._lasts and not ends
        return ends


def close(connection: redis.Connection | None) -> None:
    """Close the connection, if there is one."""
    if connection is not None:
        connection.disconnect()


def store_error(name: str, exc: BaseException, locks: Sequence[str] = ()) -> StoreError:
    """
    Make a StoreError of a client's error.

    Raise it ``from None``: the text of *exc* may hold a password.  *exc* is kept in ``raw``.

    Args:
        name: Name of the server.
        exc: The client's error.
        locks: Names of the locks that the script was run on; empty: no script.
    """
    reason = reason_of(exc)
    error = StoreError(name, reason)
    if isinstance(exc, NoPermissionError):
        error = ForbiddenError(name, reason)
    elif locks and isinstance(exc, ResponseError) and DAMAGE.search(str(exc)):
        error = DamagedLockError(name, AROUND.sub("", reason), ", ".join(locks))
    error.raw = exc
    return error


def locks_of(command: Command) -> list[str]:
    """Return the locks that a script command is run on; empty for other commands."""
    if command[0] not in {b"EVAL", b"EVALSHA"}:
        return []
    number = int(command[2])
    return [str(key) for key in command[3 : 3 + number]]
