"""The wire to one Redis process: how connections are made, kept and used.

Connections are made by redis-py and used one command at a time, without its client and pool on
top: those cost more per command than the command.  An idle connection waits on a stack; there are
never more of them than callers were at once in a command.  A connection on which anything went
wrong, an exception raised by a signal handler included, is closed and never used again: the next
reply on it might belong to the command before.
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any

import redis
from kombu.utils.imports import symbol_by_name
from redis.backoff import NoBackoff
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
from redis.retry import Retry

from celery_dislock.config.urls import HIDDEN, redis_options, redis_url
from celery_dislock.exceptions import (
    DamagedLockError,
    ForbiddenError,
    SettingsError,
    StoreError,
)
from celery_dislock.redaction import Ours, reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Command = tuple[str | bytes | float, ...]
    # Given the seconds it may take to find the server, or None for the options' own.
    Connect = Callable[[float | None], redis.Connection]
    # Given a connection, and the seconds it may take; raises redis.ConnectionError.
    Confirm = Callable[[redis.Connection, float | None], None]

SOCKET_TIMEOUT = 2.0  # seconds for a reply, and for a connection, before it counts as lost

DOTTED = re.compile(r"\w+([.:]\w+)+")  # the name of an object in a module

CLUSTER_ERRORS = {  # those that redis-py 5 does not tell from others
    "ASK": AskError,
    "CLUSTERDOWN": ClusterDownError,
    "MOVED": MovedError,
    "TRYAGAIN": TryAgainError,
}

# What a script answers where a key of its lock, or a record in it, is not as the scripts write it.
DAMAGE = re.compile(r"WRONGTYPE|dislock: |is not an integer|(?<!@)user_script:\d+: ")
# What Redis puts around that: before 7.0 in front of it, and from then on behind it.
AROUND = re.compile(
    r"^Error running script \(.*?\): (@?user_script:\d+: )*|dislock: "
    r"| script: \w+, on @user_script.*$"
)
# How a script's error ends that missed a key where a slot moves.
ON_ANOTHER_NODE = "attempted to access a non local key"

# What a server that is away raises: redis-py's errors, and its retry of a plain OSError.
AWAY = (redis.ConnectionError, redis.TimeoutError, OSError)


class Answered(Ours):  # as NoScriptError: the connection is as good as before
    """The server answered, though not as was wished."""


class Silence(Ours, redis.TimeoutError):
    """No reply has begun to come in time; the connection is open still."""


class Demoted(Ours, redis.ConnectionError):
    """The server says that it is a replica."""


class Wire:
    """
    The connections to one Redis process, for the commands of many threads or greenlets.

    What goes wrong is raised as redis-py has it.

    Args:
        connect: Makes a connection; it need not connect yet.
        confirm: Sees that a connection leads to the right server when a reply has come.
    """

    def __init__(self, connect: Connect, confirm: Confirm | None = None) -> None:
        self._connect = connect
        self._confirm = confirm
        self._idle: list[redis.Connection] = []

    def start(
        self, command: Command, before: Command | None = None, within: float | None = None
    ) -> redis.Connection:
        """
        Send a command.

        Args:
            command: What is to be carried out.
            before: What is sent first, and answered.
            within: Seconds for a connection, where none is idle; None: the options' own.

        Returns:
            Where :meth:`finish` is to read the reply.
        """
        return self.send(self.connected(within), command, before)

    def connected(self, within: float | None = None) -> redis.Connection:
        """
        Take a connection for :meth:`send`: an idle one, or a new one, which connects.

        Args:
            within: Seconds to connect; None: the options' own.
        """
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        connection = connect_within(self._connect, within)
        try:
            connection.connect()
        except BaseException:
            close(connection)
            raise
        return connection

    def send(
        self, connection: redis.Connection, command: Command, before: Command | None = None
    ) -> redis.Connection:
        """Send a command, and before it another, which is answered; see :meth:`start`."""
        try:
            if before:
                connection.send_packed_command(pack(connection, *before), check_health=False)
                connection.read_response()
            connection.send_packed_command(pack(connection, *command), check_health=False)
        except BaseException:
            close(connection)
            raise
        return connection

    def finish(
        self,
        connection: redis.Connection,
        then: Callable[[redis.Connection, Any], None] | None = None,
        *,
        within: float | None = None,
        undo: Command | None = None,
    ) -> Any:
        """
        Read the reply to what was sent.

        Args:
            connection: Where it was sent.
            then: What else there is to be done on that connection; given the reply.
            within: Seconds until the reply begins to come; None: the connection's own.
            undo: What to send where none does.  The command may still be carried out at any later
                time; this is so after it.

        Returns:
            The reply, strings as bytes.
        """
        try:
            reply = read(connection, within)
            if self._confirm:
                self._confirm(connection, None)
            if then:
                then(connection, reply)
        except (NoScriptError, Answered):
            self._idle.append(connection)
            raise
        except BaseException as exc:
            if undo and isinstance(exc, Silence):
                with contextlib.suppress(RedisError, OSError):
                    connection.send_packed_command(pack(connection, *undo), check_health=False)
            close(connection)
            raise
        self._idle.append(connection)
        return reply

    def close_idle(self) -> None:
        """Close the connections that wait for a command."""
        with contextlib.suppress(IndexError):  # other threads take from the stack, too
            while True:
                self._idle.pop().disconnect()


def connection_maker(
    name: str, url: str, options: Mapping[str, Any]
) -> Callable[..., redis.Connection]:
    """
    Return what makes the connections of this URL; its keyword arguments win over the URL's.

    Args:
        name: The setting's value as a message may show it.
        url: redis://, rediss:// or unix://; Celery's redis+socket:// is understood.
        options: Keyword arguments of redis-py's Connection, on top of the URL's; ``ssl`` makes a
            redis:// a rediss://, as in Celery's ``broker_use_ssl``; ``credential_provider`` may be
            a dotted name, as in kombu, and takes the place of user and password.

    Raises:
        SettingsError: The URL or an option is not redis-py's.
    """
    settings: dict[str, Any] = {
        "socket_timeout": SOCKET_TIMEOUT,
        "socket_connect_timeout": SOCKET_TIMEOUT,
        "retry": Retry(NoBackoff(), 0),
        **redis_options(options),
    }
    if settings.pop("ssl", False) and url.startswith("redis://"):
        url = f"rediss{url.removeprefix('redis')}"
    url = redis_url(url)
    if not url.startswith("unix://"):
        settings.setdefault("socket_keepalive", True)
    try:
        pool = redis.ConnectionPool.from_url(url, **settings)
        if "credential_provider" in pool.connection_kwargs:
            _use_provider(pool.connection_kwargs)
        pool.connection_class(**pool.connection_kwargs)
    except SettingsError:
        raise
    except TypeError as exc:  # unknown to the kind of connection that the URL asks for
        option, names = "dislock_transport_options", sorted(settings)
        raise SettingsError("app.conf", option, names, unknown_option(exc)) from None
    except (ValueError, RedisError):
        # Not from its cause, which may quote the password.
        remedy = "give redis://, rediss:// or unix://, with special characters as %XX"
        raise SettingsError("app.conf", "dislock_url", name, remedy) from None
    kind, arguments = pool.connection_class, pool.connection_kwargs
    if arguments.get("db"):
        arguments["db"] = str(arguments["db"])  # see pack(): redis-py sends it as it is

    def make(**more: Any) -> redis.Connection:
        connection: redis.Connection = kind(**{**arguments, **more})
        # redis-py greets the server with a number: HELLO 3.
        connection._command_packer = _AsText(connection._command_packer)  # noqa: SLF001
        return connection

    return make


class _AsText:
    """Packs redis-py's own commands as :func:`pack` does ours."""

    def __init__(self, packer: Any) -> None:
        self._packer = packer

    def pack(self, *command: Any) -> Any:
        if command[0] == "HELLO":
            command = tuple([_as_text(part) for part in command])
        return self._packer.pack(*command)


def _use_provider(arguments: dict[str, Any]) -> None:
    given = arguments["credential_provider"]
    option, remedy = "dislock_transport_options", "give a redis.CredentialProvider, or its name"
    # An object may show what it holds.
    named = isinstance(given, str) and DOTTED.fullmatch(given)
    shown = {"credential_provider": given if named else HIDDEN}
    try:
        provider = symbol_by_name(given)() if isinstance(given, str) else given
    except (ImportError, AttributeError, TypeError, ValueError) as exc:
        why = f"{remedy}: it could not be made ({type(exc).__name__})"
        raise SettingsError("app.conf", option, shown, why) from None
    if not isinstance(provider, redis.CredentialProvider):
        raise SettingsError("app.conf", option, shown, remedy)
    for name in ("username", "password"):
        arguments.pop(name, None)
    arguments["credential_provider"] = provider


def pack(connection: redis.Connection, *command: str | bytes | float) -> Any:
    """
    Pack a command for its way, numbers as text.

    hiredis 3.5 can crash the process where a signal handler raises while it packs an int.
    """
    return connection.pack_command(
        *[part if isinstance(part, (str, bytes)) else str(part) for part in command]
    )


def _as_text(part: Any) -> str | bytes:
    return part if isinstance(part, (str, bytes)) else str(part)


def unknown_option(exc: TypeError) -> str:
    """Say which argument of a connection is unknown; nothing else of the error's text."""
    found = re.search(r"unexpected keyword argument '(\w+)'", str(exc))
    return f"redis-py has no option {found[1]!r} here" if found else "one of them has a wrong type"


def connect_within(connect: Connect, within: float | None) -> redis.Connection:
    """Make a connection that is given *within* seconds to connect, and for each reply."""
    connection = connect(within)
    if within is not None:
        connection.socket_connect_timeout = connection.socket_timeout = within
    return connection


def read(connection: redis.Connection, within: float | None = None) -> Any:
    """
    Read a reply, strings as bytes.

    Args:
        connection: Where a command was sent.
        within: Seconds until it begins to come; None: the connection's own.

    Raises:
        Silence: It did not begin to come.
        redis.RedisError: It is an error, or the connection broke.
    """
    if within is not None and not connection.can_read(timeout=within):
        raise Silence(f"no reply within {within:.2f} s")
    try:
        return connection.read_response(disable_decoding=True)
    except ResponseError as exc:
        if demoted(exc):
            raise Demoted("it is a replica, and no longer the master") from exc
        code, _, told = str(exc).partition(" ")
        if ON_ANOTHER_NODE in str(exc):
            raise TryAgainError("its slot of the cluster is being moved to another node") from exc
        if code in CLUSTER_ERRORS and type(exc) is ResponseError:  # redis-py 5 leaves them plain
            raise CLUSTER_ERRORS[code](told) from exc
        raise


def demoted(exc: BaseException) -> bool:
    """Tell whether the server says it is a replica; before Redis 7 a script's error hides it."""
    return isinstance(exc, redis.ReadOnlyError) or (
        isinstance(exc, ResponseError) and "READONLY" in str(exc)
    )


def is_answer(error: StoreError) -> bool:
    """Tell whether the server has answered, with an error; else it is away."""
    return isinstance(error.raw, ResponseError)


def close(connection: redis.Connection | None) -> None:
    """Close a connection, where there is one."""
    if connection is not None:
        connection.disconnect()


def store_error(name: str, exc: BaseException, locks: Sequence[str] = ()) -> StoreError:
    """
    Make the error of a server; raise it ``from None``, see its ``raw``.

    Args:
        name: The server's.
        exc: What went wrong.
        locks: Names of the locks that it was asked about by a script; empty: none.
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
    """Name the locks that a command is about, where it runs a script."""
    if command[0] not in {b"EVAL", b"EVALSHA"}:
        return []
    number = int(command[2])
    return [str(key) for key in command[3 : 3 + number]]
