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
from celery_dislock.exceptions import DamagedLockError, ForbiddenError, SettingsError, StoreError
from celery_dislock.redaction import Ours, reason_of
from celery_dislock.servers.driver import BLOCKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from celery_dislock.servers.driver import Driver

    Command = tuple[str | bytes | float, ...]
    # Given the seconds to find the server; None: the timeout in the options.
    Connect = Callable[[float | None], redis.Connection]
    # Given a connection and the seconds for the check; raises redis.ConnectionError.
    Confirm = Callable[[redis.Connection, float | None], None]

SOCKET_TIMEOUT = 2.0  # seconds to wait for a reply, and to connect

DOTTED = re.compile(r"\w+([.:]\w+)+")  # the name of an object in a module

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

# Errors which mean that the server is away: redis-py's, and an OSError that redis-py passes on.
AWAY = (redis.ConnectionError, redis.TimeoutError, OSError)


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
        self, command: Command, before: Command | None = None, within: float | None = None
    ) -> redis.Connection:
        """
        Send a command; :meth:`finish` reads the reply.

        Args:
            command: The command.
            before: A command to send first, whose reply is read and dropped.
            within: Seconds to connect if no connection is idle; None: the timeout in the options.

        Returns:
            The connection, for :meth:`finish`.
        """
        return self.send(self.connected(within), command, before)

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

    def send(
        self, connection: redis.Connection, command: Command, before: Command | None = None
    ) -> redis.Connection:
        """Send a command on this connection, after *before*; see :meth:`start`."""
        try:
            if before:
                connection.send_packed_command(connection.pack_command(*before), check_health=False)
                connection.read_response()
            connection.send_packed_command(connection.pack_command(*command), check_health=False)
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
        try:
            reply = read(connection, within)
            if self._confirm:
                self._confirm(connection, None)
            if then:
                then(connection, reply)
        except (NoScriptError, Answered):
            self._keep(connection)
            raise
        except BaseException as exc:
            breaks_off = isinstance(exc, Silence) or not isinstance(exc, (RedisError, OSError))
            # redis-py may have closed it.  To connect again would wait, and come in any order.
            if undo and breaks_off and connection._sock is not None:  # noqa: SLF001 -- no other way
                with contextlib.suppress(RedisError, OSError):
                    connection.send_packed_command(
                        connection.pack_command(*undo()), check_health=False
                    )
            close(connection)
            raise
        self._keep(connection)
        return reply

    def _keep(self, connection: redis.Connection) -> None:
        self._idle.append(connection)
        if self._closed:
            self.close_idle()

    def close(self) -> None:
        """Close the idle connections, and from now on each one after its use."""
        self._closed = True
        self.close_idle()

    def close_idle(self) -> None:
        """Close the idle connections."""
        with contextlib.suppress(IndexError):  # other threads take from the stack, too
            while True:
                self._idle.pop().disconnect()


def connection_maker(
    name: str, url: str, options: Mapping[str, Any], driver: Driver = BLOCKING
) -> Callable[..., redis.Connection]:
    """
    Return a function that makes connections to this URL.

    Keyword arguments of that function override those of the URL and the options.

    Args:
        name: The URL without its password, for messages.
        url: redis://, rediss:// or unix://; Celery's redis+socket:// is accepted, too.
        options: Keyword arguments of redis-py's Connection, in addition to those of the URL.
            ``ssl`` turns redis:// into rediss://, as in Celery's ``broker_use_ssl``.
            ``credential_provider`` may be a dotted name, as in kombu, and replaces user and
            password.
        driver: Makes the connections.

    Raises:
        SettingsError: redis-py does not accept the URL or an option.
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
        driver.connection(pool.connection_class, pool.connection_kwargs)
    except SettingsError:
        raise
    except TypeError as exc:  # not an option of the connection class that the URL selects
        option, names = "dislock_transport_options", sorted(settings)
        raise SettingsError("app.conf", option, names, unknown_option(exc)) from None
    except (ValueError, RedisError):
        # Raised without its cause, which may quote the password.
        remedy = "give redis://, rediss:// or unix://, with special characters as %XX"
        raise SettingsError("app.conf", "dislock_url", name, remedy) from None
    kind, arguments = pool.connection_class, pool.connection_kwargs

    def make(**more: Any) -> redis.Connection:
        return driver.connection(kind, {**arguments, **more})

    return make


def _use_provider(arguments: dict[str, Any]) -> None:
    given = arguments["credential_provider"]
    option, remedy = "dislock_transport_options", "give a redis.CredentialProvider, or its name"
    # The repr of a provider object may show its password.
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


def unknown_option(exc: Exception) -> str:
    """Return which connection option is unknown, without the rest of the error's text."""
    found = re.search(r"unexpected keyword argument '(\w+)'", str(exc))
    return f"redis-py has no option {found[1]!r} here" if found else "one of them has a wrong type"


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
