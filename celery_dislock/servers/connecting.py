"""Make the connections of a URL: what its options mean, and what is wrong with them."""

from __future__ import annotations

import _socket
import re
import socket
import struct
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import hiredis
import redis
from kombu.utils.imports import symbol_by_name
from redis._parsers import BaseParser
from redis.backoff import NoBackoff
from redis.connection import AbstractConnection
from redis.exceptions import RedisError
from redis.retry import Retry

from celery_dislock.config.urls import HIDDEN, redis_options, redis_url
from celery_dislock.exceptions import SettingsError
from celery_dislock.servers.connections import (
    INCOMPLETE,
    NUMBERS,
    SOCKET_TIMEOUT,
    read_response,
)
from celery_dislock.servers.tls import check_tls

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# Whether the system can limit the wait for a reply, with a struct whose layout is known here.
TIMES_SOCKETS = sys.platform == "linux" and sys.maxsize > 2**32
MICROSECONDS = 1_000_000  # in a second
MOST_AT_ONCE = 16384  # bytes that are read at once; replies are small
NO_DATABASE = "the database is a number: give redis://host:6379/0"
REDIS_KINDS: Any = (redis.Connection, redis.SSLConnection, redis.UnixDomainSocketConnection)


class _Packer:
    """Pack the commands that redis-py itself sends; the name of one may be several words."""

    def __init__(self, packer: Any) -> None:
        self._pack = packer.pack

    def pack(self, *command: Any) -> Any:
        return self._pack(*[str(part) if part.__class__ in NUMBERS else part for part in command])


def reply_reader() -> Any:
    """Return what parses the replies of one connection; errors are redis-py's."""
    return hiredis.Reader(
        protocolError=redis.InvalidResponse,
        replyError=BaseParser.parse_error,
        notEnoughData=INCOMPLETE,
    )


class _Quick(AbstractConnection):
    """
    The part of a blocking connection that differs from redis-py's.

    redis-py connects and logs in.  After that, the replies are read from the socket directly, which
    takes a fourth of the calls that redis-py makes.
    """

    _sock: Any

    def __init__(self, **arguments: Any) -> None:
        self.replies: Any = None  # None: not logged in
        super().__init__(**arguments)
        self._command_packer = _Packer(self._command_packer)
        self.received = bytearray(MOST_AT_ONCE)

    def connect(self) -> None:
        """Connect; raises redis-py's errors."""
        self.replies = None
        connection: Any = super()
        connection.connect()
        self.replies = reply_reader()

    def set_patience(self, seconds: float) -> None:
        """Wait *seconds* for each reply, for now; redis-py has no way to do so before version 8."""
        self._sock.settimeout(seconds)

    def reset_patience(self) -> None:
        """
        Wait *socket_timeout* seconds for each reply.

        The operating system measures this time: Python would ask it before each call whether the
        socket is ready.  A wait that a signal interrupts begins anew.
        """
        sock, seconds = self._sock, self.socket_timeout
        if seconds is None or not TIMES_SOCKETS or sock.__class__.__base__ is not _socket.socket:
            sock.settimeout(seconds)  # of TLS, too, and those of gevent and eventlet
            return
        sock.settimeout(None)
        most = struct.pack("ll", *divmod(max(1, int(seconds * MICROSECONDS)), MICROSECONDS))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, most)

    read_response = read_response

    def read_to_log_in(self, *args: Any, **options: Any) -> Any:
        """Return a reply while redis-py connects; see its method."""
        return super().read_response(*args, **options)


QUICK_KINDS = {kind: type(kind.__name__, (_Quick, kind), {}) for kind in REDIS_KINDS}


def _blocking_connection(
    kind: type[redis.Connection], arguments: Mapping[str, Any]
) -> redis.Connection:
    """Make one of redis-py's connections, which blocks."""
    made: redis.Connection = QUICK_KINDS[kind](**arguments)
    return made


class Driver(NamedTuple):
    """
    A way to wait.

    Attributes:
        pause: Called with the seconds to wait between two attempts.
        connection: Makes a connection, which need not be connected yet, given a class of redis-py's
            and its keyword arguments.  It has the methods of that class that are used here.
        mutex: Makes a mutex with the methods of :class:`threading.Lock`.  Its owner may wait.
    """

    pause: Callable[[float], None] = time.sleep
    connection: Callable[[type[redis.Connection], Mapping[str, Any]], Any] = _blocking_connection
    mutex: Callable[[], Any] = threading.RLock


BLOCKING = Driver()


def connection_maker(
    name: str, url: str, options: Mapping[str, Any], driver: Driver = BLOCKING
) -> Callable[..., Any]:
    """
    Return a function that makes connections to this URL.

    Keyword arguments of that function override those of the URL and the options.  It ignores its
    positional argument, the time to find the server, as the URL names the server.

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
    try:
        url = redis_url(url)
        if not url.startswith("unix://"):
            settings.setdefault("socket_keepalive", True)
        pool = redis.ConnectionPool.from_url(url, **settings)
        _check_database(name, url, pool.connection_kwargs)
        if "credential_provider" in pool.connection_kwargs:
            _use_provider(pool.connection_kwargs)
        if issubclass(pool.connection_class, redis.SSLConnection):
            check_tls(name, pool.connection_kwargs)
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

    def make(_within: float | None = None, **more: Any) -> Any:
        return driver.connection(pool.connection_class, {**pool.connection_kwargs, **more})

    return make


def _check_database(name: str, url: str, arguments: Mapping[str, Any]) -> None:
    """Refuse a path that is no number: redis-py takes it for database 0."""
    if urlsplit(url).path.strip("/") and not arguments.keys() & {"db", "path"}:
        raise SettingsError("app.conf", "dislock_url", name, NO_DATABASE)


def _use_provider(arguments: dict[str, Any]) -> None:
    given = arguments["credential_provider"]
    option, remedy = "dislock_transport_options", "give a redis.CredentialProvider, or its name"
    shown = {"credential_provider": HIDDEN}  # what is given may be or show a password
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
