"""Make the connections of a URL: what its options mean, and what is wrong with them."""

from __future__ import annotations

import re
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import redis
from kombu.utils.imports import symbol_by_name
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from celery_dislock.config.urls import HIDDEN, redis_options, redis_url
from celery_dislock.exceptions import SettingsError
from celery_dislock.servers.connections import NUMBERS, SOCKET_TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class _Packer:
    """Pack what redis-py sends by itself, as :func:`packed` does; it may have several words."""

    def __init__(self, packer: Any) -> None:
        self._pack = packer.pack

    def pack(self, *command: Any) -> Any:
        return self._pack(*[str(part) if part.__class__ in NUMBERS else part for part in command])


def _blocking_connection(
    kind: type[redis.Connection], arguments: Mapping[str, Any]
) -> redis.Connection:
    """Make one of redis-py's connections, which blocks."""
    connection = kind(**arguments)
    connection._command_packer = _Packer(connection._command_packer)  # noqa: SLF001
    return connection


class Driver(NamedTuple):
    """
    A way to wait.

    Attributes:
        pause: Called with the seconds to wait between two attempts.
        connection: Makes a connection, which need not be connected yet, given a class of redis-py's
            and its keyword arguments.  It has the methods of that class that are used here.
        mutex: Makes a mutex as :mod:`threading` has them; who has it may wait.
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

    Keyword arguments of that function override those of the URL and the options.  It needs no time
    to find the server, and takes no notice of the limit that it is given.

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

    def make(_within: float | None = None, **more: Any) -> Any:
        return driver.connection(pool.connection_class, {**pool.connection_kwargs, **more})

    return make


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
