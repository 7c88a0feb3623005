"""Make, keep and use the connections to one Redis process.

Connections are redis-py's.  redis-py's client and pool are not used, since they cost more time per
command than the command itself.  Each connection carries one command at a time, or several that
are sent together, as renewals are.  Idle connections are kept on a stack.  Their number never
exceeds the largest number of exchanges that ran at the same time.  After any error, also an
exception raised by a signal handler, the connection is closed and never used again: the next reply
on it could belong to the previous command.
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any

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

from celery_dislock.exceptions import DamagedLockError, ForbiddenError, StoreError, UnreachableError
from celery_dislock.redaction import Ours, reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from celery_dislock.scripts import Script

    Command = tuple[str | bytes | float, ...]
    Call = tuple[str | bytes | int, ...]
    Connection = Any  # one of redis-py's with the methods of `connecting._Quick`, or its like
    # Given the seconds to find the server; None: the timeout in the options.
    Connect = Callable[[float | None], Connection]
    # Given a connection and the seconds for the check; raises redis.ConnectionError.
    Confirm = Callable[[Connection, float | None], None]

SOCKET_TIMEOUT = 2.0  # seconds to wait for a reply, and to connect
SHORTEST = 0.001  # seconds to wait for a reply if no time is left

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
# Parts of the errors of a script that misses a key because the slot is being moved: of Redis 6.2 to
# 7.0 and of Valkey 9, and of Redis from 7.2 on and of Valkey 8.
ON_ANOTHER_NODE = re.compile(
    r"to access a non local key|undeclared keys were accessed during rehashing"
)

INCOMPLETE = object()  # a reply
PUSHED = getattr(hiredis, "PushNotification", ())  # what RESP3 lets a server tell unasked
NUMBERS = {int, float, bool}  # types of what is packed as text

# Errors which mean that the server is away: redis-py's, and an OSError that redis-py passes on.
CONNECTION_ERRORS = (redis.ConnectionError, redis.TimeoutError, OSError)


def by_digest(script: Script, keys: Sequence[str], *arguments: str | bytes | float) -> Command:
    """Return the command that runs a script if the server has cached it."""
    return (b"EVALSHA", script.sha, len(keys), *keys, *arguments)


def commands_of(script: Script, calls: Sequence[Call]) -> list[Command]:
    """Return the commands that run a script many times: with key and arguments of each call."""
    return [by_digest(script, [str(key)], *arguments) for key, *arguments in calls]


def by_text(script: Script, keys: Sequence[str], *arguments: str | bytes | float) -> Command:
    """Return the command that sends and runs a script; the server then caches it."""
    return (b"EVAL", script.text, len(keys), *keys, *arguments)


def send_commands(connection: Connection, *commands: Command) -> None:
    """
    Send commands on a connection, which connects first if it is not connected.

    Numbers are sent as text: hiredis 3.5 can crash the process if a signal handler raises while
    hiredis packs an int.
    """
    packed: list[bytes] = []
    for command in commands:
        parts: Any = [str(part) if part.__class__ in NUMBERS else part for part in command]
        packed.append(hiredis.pack_command(tuple(parts)))
    connection.send_packed_command((b"".join(packed),), check_health=False)


def read_response(
    connection: Any,
    disable_decoding: bool = False,  # noqa: FBT001, FBT002 -- as in redis-py
    *,
    disconnect_on_error: bool = True,
    **options: Any,
) -> Any:
    """Return a reply on a blocking connection, strings as bytes; raises redis-py's errors."""
    replies, received = connection.replies, connection.received
    if replies is None:
        return connection.read_to_log_in(disable_decoding, **options)
    try:
        while (reply := replies.gets()) is INCOMPLETE or isinstance(reply, PUSHED):
            if reply is INCOMPLETE:
                size = connection._sock.recv_into(received)  # noqa: SLF001 -- redis-py's
                replies.feed(received, 0, size or _closed())
    except BaseException as exc:
        if disconnect_on_error:
            connection.disconnect()
        if isinstance(exc, (TimeoutError, BlockingIOError)):
            raise redis.TimeoutError("Timeout reading from socket") from exc
        if isinstance(exc, OSError):
            raise redis.ConnectionError(f"Error while reading from socket: {exc}") from exc
        raise
    if isinstance(reply, redis.RedisError):
        raise reply
    return reply


def _closed() -> int:
    raise redis.ConnectionError("Connection closed by server.")


class Demoted(Ours, redis.ConnectionError):
    """The server answered that it is a replica."""


class Wire:
    """
    The connections to one Redis process.  Safe to use from many threads or greenlets.

    Args:
        name: Name of the server in errors.
        connect: Makes a connection, which need not be connected yet.
        confirm: Checks, after each reply, that the connection leads to the right server.
    """

    def __init__(self, name: str, connect: Connect, confirm: Confirm | None = None) -> None:
        self.name = name
        self._connect = connect
        self._confirm = confirm
        self._idle: list[Connection] = []
        self._closed = False

    def ask(
        self,
        commands: Sequence[Command],
        script: Script | None = None,
        *,
        within: float | None = None,
        again: bool = False,
        undo: Callable[[], Command] | None = None,
    ) -> list[Any]:
        """Send commands and read the replies; see :meth:`start` and :meth:`finish`."""
        connection = self.start(commands, within=within, again=again)
        return self.finish(connection, commands, script, within=within, again=again, undo=undo)

    def start(
        self,
        commands: Sequence[Command],
        *,
        within: float | None = None,
        again: bool = False,
    ) -> Connection:
        """
        Send commands; :meth:`finish` reads the replies.

        Args:
            commands: The commands.
            within: Seconds to connect if no connection is idle; None: the timeout in the options.
            again: Whether they are sent again, once, if the connection has broken.

        Returns:
            The connection, for :meth:`finish`.

        Raises:
            UnreachableError: There is no connection, so nothing was sent.
            StoreError: The connection has broken.
        """
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connected(within)
        try:
            send_commands(connection, *commands)
        except BaseException as exc:  # noqa: BLE001 -- raised again by _failed()
            connection.disconnect()
            if again and isinstance(exc, redis.ConnectionError):
                self.close_idle()
                return self.start(commands, within=within)
            raise self._failed(exc) from None
        return connection

    def finish(
        self,
        connection: Connection,
        commands: Sequence[Command],
        script: Script | None = None,
        *,
        within: float | None = None,
        again: bool = False,
        then: Callable[[Connection, Any], Any] | None = None,
        undo: Callable[[], Command] | None = None,
    ) -> list[Any]:
        """
        Read the replies to what :meth:`start` has sent.

        Args:
            connection: The connection on which the commands were sent.
            commands: The commands.
            script: The script that all commands run by its digest.  Its text is sent if the server
                does not know it.
            within: Seconds until each reply arrives; None: the connection's timeout.
            again: As for :meth:`start`; then this may take twice as long.
            then: Called with the connection and the last reply, for further commands on it; returns
                what takes the place of the reply.
            undo: Returns a command to send if no reply arrives *within* these seconds, or a
                cancellation on an event loop interrupts this call.  The server may still run the
                other commands at any later time, and runs that one after them.

        Returns:
            The reply to each command, strings as bytes, or a StoreError if the reply is an error.

        Raises:
            StoreError: The server did not answer.  Each command may have run or not.
        """
        is_clean = False  # a reply may still come
        try:
            replies = self._read(connection, commands, script, within)
            if self._confirm:
                self._confirm(connection, within)
            if then:
                replies[-1] = then(connection, replies[-1])
            is_clean = True
            for reply in replies:  # a generator would be a call more in each exchange
                is_clean = is_clean and not isinstance(reply, StoreError)
        except BaseException as exc:  # noqa: BLE001 -- raised again by _failed()
            is_clean = False
            if undo:
                _break_off(connection, exc, within, undo)
            if again and isinstance(exc, redis.ConnectionError):
                self.close_idle()
                with contextlib.suppress(StoreError):
                    return self.ask(commands, script, within=within, undo=undo)
            raise self._failed(exc) from None
        finally:
            if is_clean:
                self._idle.append(connection)
                if self._closed:
                    self.close_idle()
            else:
                connection.disconnect()
        return replies

    def _connected(self, within: float | None) -> Connection:
        connection: Connection | None = None
        try:
            connection = self._connect(within)
            patience = connection.socket_timeout
            if within is not None:
                connection.socket_connect_timeout = connection.socket_timeout = within
            connection.connect()
            connection.socket_timeout = patience
            connection.reset_patience()
        except BaseException as exc:  # noqa: BLE001 -- raised again by _failed()
            if connection is not None:
                connection.disconnect()
            raise self._failed(exc, UnreachableError) from None
        return connection

    def _read(
        self,
        connection: Connection,
        commands: Sequence[Command],
        script: Script | None,
        within: float | None,
    ) -> list[Any]:
        if within is not None:
            connection.set_patience(max(within, SHORTEST))
        replies: list[Any] = []
        unknown: list[int] = []
        for number, command in enumerate(commands):
            try:
                reply = connection.read_response(
                    disable_decoding=True, disconnect_on_error=within is None
                )
            except ResponseError as exc:
                reply = store_error(self.name, _meant(exc), locks_of_command(command))
                if script is not None and isinstance(exc, NoScriptError):
                    unknown.append(number)
            replies.append(reply)
        if script is not None and unknown:
            again = [commands[number] for number in unknown]
            again[0] = (b"EVAL", script.text, *again[0][2:])  # loads the script for the others
            send_commands(connection, *again)
            answers = self._read(connection, again, None, within)
            for number, answer in zip(unknown, answers, strict=True):
                replies[number] = answer
        if within is not None:
            connection.reset_patience()
        return replies

    def _failed(self, exc: BaseException, kind: type[StoreError] = StoreError) -> StoreError:
        """Return what to raise for an error of the client; raise any other as it is."""
        if not isinstance(exc, (RedisError, OSError)):
            raise exc
        if not isinstance(exc, CONNECTION_ERRORS):
            return store_error(self.name, exc)
        self.close_idle()  # they are older than the failure, too
        return store_error(self.name, exc, kind=kind)

    def close(self) -> None:
        """Close the idle connections, and from now on each one after its use."""
        self._closed = True
        self.close_idle()

    def close_idle(self) -> None:
        """Close the idle connections."""
        with contextlib.suppress(IndexError):  # other threads take from the stack, too
            while True:
                self._idle.pop().disconnect()


def _break_off(
    connection: Connection,
    exc: BaseException,
    within: float | None,
    undo: Callable[[], Command],
) -> None:
    """Send the command that undoes those whose replies nobody waits for any more."""
    silent = within is not None and isinstance(exc, redis.TimeoutError)
    # If redis-py has closed the connection, nothing is sent: connecting again would block, and the
    # command could reach the server before those that it undoes.
    is_open = connection._sock is not None  # noqa: SLF001 -- no other way
    if is_open and (silent or not isinstance(exc, (RedisError, OSError))):
        with contextlib.suppress(RedisError, OSError):
            send_commands(connection, undo())


def _meant(exc: ResponseError) -> ResponseError:
    """
    Return the typed error for a server's error whose type redis-py does not know.

    Raises:
        Demoted: The server is a replica.  Before Redis 7, a script's error does not begin with
            READONLY.
    """
    if isinstance(exc, redis.ReadOnlyError) or "READONLY" in str(exc):
        raise Demoted("it is a replica, and no longer the master") from exc
    code, _, told = str(exc).partition(" ")
    if ON_ANOTHER_NODE.search(str(exc)):
        return TryAgainError("its slot is being moved to another node of the cluster")
    if code in CLUSTER_ERRORS and type(exc) is ResponseError:  # redis-py 5
        return CLUSTER_ERRORS[code](told)
    return exc


def only_reply(replies: Sequence[Any]) -> Any:
    """Return the one reply; raise it if it is an error."""
    (reply,) = replies
    if isinstance(reply, StoreError):
        raise reply
    return reply


def is_answer(error: StoreError) -> bool:
    """Tell whether the error is the server's reply.  If not, the server counts as away."""
    return isinstance(error.raw, ResponseError)


def store_error(
    name: str,
    exc: BaseException,
    locks: Sequence[str] = (),
    kind: type[StoreError] = StoreError,
) -> StoreError:
    """
    Make a StoreError of a client's error.

    Raise it ``from None``: the text of *exc* may hold a password.  *exc* is kept in ``raw``.

    Args:
        name: Name of the server.
        exc: The client's error.
        locks: Names of the locks that the script was run on; empty: no script.
        kind: What to make, unless *exc* says more.
    """
    reason = reason_of(exc)
    error = kind(name, reason)
    if isinstance(exc, NoPermissionError):
        error = ForbiddenError(name, reason)
    elif locks and isinstance(exc, ResponseError) and DAMAGE.search(str(exc)):
        error = DamagedLockError(name, AROUND.sub("", reason), ", ".join(locks))
    error.raw = exc
    return error


def locks_of_command(command: Command) -> list[str]:
    """Return the locks that a script command is run on; empty for other commands."""
    if command[0] not in {b"EVAL", b"EVALSHA"}:
        return []
    number = int(command[2])
    return [str(key) for key in command[3 : 3 + number]]
