"""The wire to a lock server; the only importer of redis-py.

Everything that is sent is safe to send twice, so a command whose reply was lost is simply sent
again on a fresh connection, a few times, before the server counts as away.

Connections are made by redis-py and used one command at a time, without its client and pool on
top: those cost more per command than the command.  An idle connection waits on a stack; there are
never more of them than callers were at once in a command.  A connection on which anything went
wrong, an exception raised by a signal handler included, is closed and never used again: the next
reply on it might belong to the command before.
"""

from __future__ import annotations

import contextlib
import re
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError, ResponseError
from redis.retry import Retry

from celery_dislock.exceptions import SettingsError, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from celery_dislock.scripts import Script

RESENDS = 2  # times a command is sent again when its reply is lost
RESEND_PAUSE = 0.1  # seconds before the second resend; the first one follows at once
SOCKET_TIMEOUT = 2.0  # seconds for a reply, and for a connection, before it counts as lost

# What a server that is away raises: redis-py's errors, and its retry of a plain OSError.
AWAY = (redis.ConnectionError, redis.TimeoutError, OSError)


class Server:
    """One Redis server, and the connections to it.

    Safe to use from many threads or greenlets, but for :meth:`run_many`.

    Args:
        url: redis://, rediss:// or unix://; Celery's redis+socket:// is understood.
        options: Keyword arguments of redis-py's Connection, on top of the URL's.
        pause: Called with seconds to wait between two attempts.

    Raises:
        SettingsError: The URL or an option is not redis-py's.

    Attributes:
        name: The URL as a message may show it.
    """

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any] | None = None,
        *,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.name = without_password(url)
        self._pause = pause
        self._idle: list[redis.Connection] = []
        self._batching: redis.Connection | None = None
        settings: dict[str, Any] = {
            "socket_timeout": SOCKET_TIMEOUT,
            "socket_connect_timeout": SOCKET_TIMEOUT,
            "retry": Retry(NoBackoff(), 0),
            **(options or {}),
        }
        url = _redis_url(url)
        if not url.startswith("unix://"):
            settings.setdefault("socket_keepalive", True)
        try:
            pool = redis.ConnectionPool.from_url(url, **settings)
            pool.connection_class(**pool.connection_kwargs)
        except TypeError as exc:  # unknown to the kind of connection that the URL asks for
            option = "dislock_transport_options"
            raise SettingsError("app.conf", option, sorted(settings), str(exc)) from exc
        except (ValueError, RedisError):
            # Not from its cause, which may quote the password.
            remedy = "give redis://, rediss:// or unix://, with special characters as %XX"
            raise SettingsError("app.conf", "dislock_url", self.name, remedy) from None
        self._connect: Callable[[], redis.Connection] = lambda: pool.connection_class(
            **pool.connection_kwargs
        )

    def run(self, script: Script, key: str, *arguments: str | int) -> Any:
        """
        Run a script; blocks for a round trip, or a few where replies are lost.

        Returns:
            Its reply, strings as bytes.

        Raises:
            StoreError: No reply came, or an error; the script may have run.
        """
        try:
            return self.send(b"EVALSHA", script.sha, 1, key, *arguments)
        except NoScriptError:
            return self.send(b"EVAL", script.text, 1, key, *arguments)

    def send(self, *command: str | bytes | int) -> Any:
        """
        Send a command; see :meth:`run`.

        Raises:
            StoreError: No reply came, or an error; the command may have been carried out.
            NoScriptError: The server does not know the script.
        """
        for attempt in range(1 + RESENDS):
            try:
                connection = self._idle.pop()
            except IndexError:
                connection = self._connect()
            try:
                packed = connection.pack_command(*command)
                connection.send_packed_command(packed, check_health=False)
                reply = connection.read_response(disable_decoding=True)
            except NoScriptError:
                self._idle.append(connection)
                raise
            except AWAY as exc:
                connection.disconnect()
                self._close_idle()  # they are from before the server went away, too
                if attempt == RESENDS:
                    raise self._error(exc) from exc
                self._pause(attempt * RESEND_PAUSE)
            except RedisError as exc:
                connection.disconnect()
                raise self._error(exc) from exc
            except BaseException:
                connection.disconnect()
                raise
            else:
                self._idle.append(connection)
                return reply
        raise AssertionError("unreachable")  # pragma: no cover

    def pop(self, key: str, seconds: float) -> bool:
        """
        Take an element from a list; blocks until there is one, *seconds* at most (BLPOP).

        Nothing is resent: what was taken may be lost with its reply, so ask the server what is.

        Args:
            key: Name of the list.
            seconds: > 0, a fraction allowed.

        Returns:
            Whether there was one.

        Raises:
            StoreError: No reply came, or an error; an element may have been taken.
        """
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connect()
        try:
            packed = connection.pack_command(b"BLPOP", key, seconds)
            connection.send_packed_command(packed, check_health=False)
            connection.can_read(timeout=seconds + SOCKET_TIMEOUT)
            reply = connection.read_response(disable_decoding=True)
        except (RedisError, OSError) as exc:
            connection.disconnect()
            raise self._error(exc) from exc
        except BaseException:
            connection.disconnect()
            raise
        self._idle.append(connection)
        return reply is not None

    def run_many(
        self, script: Script, calls: Sequence[tuple[str | int, ...]], *, within: float
    ) -> list[Any]:
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
        connection, self._batching = self._batching, None
        if connection is None:
            connection = self._connect()
            # For the handshake too, and for the rest of a batch once its first reply has come.
            connection.socket_connect_timeout = connection.socket_timeout = within
        try:
            replies = _pipeline(connection, script, calls, within)
            if any(isinstance(reply, NoScriptError) for reply in replies):
                connection.send_command("SCRIPT", "LOAD", script.text)
                connection.read_response()
                replies = _pipeline(connection, script, calls, within)
        except (RedisError, OSError) as exc:
            connection.disconnect()
            raise self._error(exc) from exc
        except BaseException:
            connection.disconnect()
            raise
        self._batching = connection
        return [self._error(r) if isinstance(r, Exception) else r for r in replies]

    def close(self) -> None:
        """Close the connections that are not in use."""
        self._close_idle()
        if self._batching is not None:
            self._batching.disconnect()

    def _close_idle(self) -> None:
        with contextlib.suppress(IndexError):  # other threads take from the stack, too
            while True:
                self._idle.pop().disconnect()

    def _error(self, exc: Exception) -> StoreError:
        return StoreError(self.name, str(exc) or type(exc).__name__)


def _pipeline(
    connection: redis.Connection,
    script: Script,
    calls: Sequence[tuple[str | int, ...]],
    within: float,
) -> list[Any]:
    commands = [connection.pack_command(b"EVALSHA", script.sha, 1, *call) for call in calls]
    connection.send_packed_command([b"".join(map(b"".join, commands))], check_health=False)
    if not connection.can_read(timeout=within):
        raise redis.TimeoutError(f"no reply within {within:.2f} s")
    return [_read(connection) for _ in commands]


def _read(connection: redis.Connection) -> Any:
    try:
        return connection.read_response(disable_decoding=True)
    except AWAY:
        raise
    except ResponseError as exc:
        return exc


def _redis_url(url: str) -> str:
    """Rewrite Celery's spellings as redis-py's: ``redis+socket://``, and ``CERT_REQUIRED``."""
    parts = urlsplit(url)
    if parts.scheme == "rediss":
        return re.sub(r"(?<=ssl_cert_reqs=)CERT_(\w+)", lambda m: m[1].lower(), url)
    if parts.scheme != "redis+socket":
        return url
    query = parse_qs(parts.query)
    database = query.get("virtual_host", query.get("db", ["0"]))[0].strip("/")
    return f"unix://{parts.netloc}{parts.path}?db={database}"


def without_password(url: str) -> str:
    """Return the URL as a log line may show it, whatever is wrong with it."""
    scheme, _, rest = url.partition("://")
    user, at, host = rest.rpartition("@")
    if not at:
        return f"{scheme}://{rest.partition('?')[0]}"
    name = user.partition(":")[0]
    return f"{scheme}://{name}:***@{host.partition('?')[0]}"
