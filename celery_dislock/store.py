"""The lock server: runs the Lua scripts on Redis, and the only importer of redis-py.

Every script is safe to send twice, so a command whose reply was lost is simply sent again on a
fresh connection, a few times, before the server counts as away.

Connections are made by redis-py and used one command at a time, without its client and pool on
top: those cost more per command than the command.  An idle connection waits on a stack; there are
never more of them than callers were at once in a script.  A connection on which anything went
wrong, an exception raised by a signal handler included, is closed and never used again: the next
reply on it might belong to the command before.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError, ResponseError
from redis.retry import Retry

from celery_dislock.exceptions import SettingsError, StoreError
from celery_dislock.scripts import ACQUIRE, RELEASE, RELEASE_DEAD, RENEW

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from celery_dislock.scripts import Script

RESENDS = 2  # times a command is sent again when its reply is lost
RESEND_PAUSE = 0.1  # seconds before the second resend; the first one follows at once
SOCKET_TIMEOUT = 2.0  # seconds for a reply, and for a connection, before it counts as lost

# What a server that is away raises: redis-py's errors, and its retry of a plain OSError.
AWAY = (redis.ConnectionError, redis.TimeoutError, OSError)


class Granted(NamedTuple):
    """The lock was taken, or its owner had it already."""

    token: int


class Refused(NamedTuple):
    """The lock is held."""

    owner: str
    remaining: float  # seconds
    holder: Mapping[str, Any]


def milliseconds(seconds: float) -> int:
    """Convert a duration, rounded up: a lease never ends before its time."""
    return -int(-seconds * 1000 // 1)


class Store:
    """The leases on one Redis server.

    Every method blocks for a round trip, no longer than the socket timeouts allow; all are safe to
    call from many threads or greenlets.

    Args:
        url: redis://, rediss:// or unix://; Celery's redis+socket:// is understood.
        options: Keyword arguments of redis-py's Connection, on top of the URL's.
        pause: Called with seconds to wait between two attempts.

    Raises:
        SettingsError: The URL or an option is not redis-py's.
    """

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any] | None = None,
        *,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.server = without_password(url)
        self._pause = pause
        self._idle: list[redis.Connection] = []
        self._renewing: redis.Connection | None = None
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
            raise SettingsError("app.conf", "dislock_url", self.server, remedy) from None
        self._new_connection: Callable[[], redis.Connection] = lambda: pool.connection_class(
            **pool.connection_kwargs
        )

    def acquire(self, lock: str, owner: str, ttl: float, holder: str) -> Granted | Refused:
        """
        Take the lock, or confirm and renew the lease that its owner already has.

        Args:
            lock: Name of the lock in Redis.
            owner: Who asks; no two acquisitions share it.
            ttl: Expiry of the lease in seconds, > 0, rounded up to a millisecond.
            holder: JSON object that others are shown while the lock is held.

        Returns:
            The fencing token, or the lease that is in the way.

        Raises:
            StoreError: The server did not answer; the lock may have been taken, see there.
        """
        reply = self._run(ACQUIRE, lock, owner, milliseconds(ttl), holder)
        if reply[0] == 1:
            return Granted(int(reply[1]))
        _, remaining_ms, other, other_holder = reply
        return Refused(
            other.decode().removeprefix("~"), remaining_ms / 1000, json.loads(other_holder)
        )

    def release(self, lock: str, owner: str, at_least: float = 0.0) -> bool:
        """
        End the owner's lease, or let it run out *at_least* seconds after its acquisition.

        Returns:
            True where the owner still held it; False where it was gone, which is also the answer
            to a release that is sent again.

        Raises:
            StoreError: The server did not answer; the lease ends with its expiry at the latest.
        """
        return bool(self._run(RELEASE, lock, owner, milliseconds(at_least)))

    def release_dead(self, lock: str, owner_start: str, at_least: float = 0.0) -> int:
        """
        End the leases of owners that begin with *owner_start*; their process is known to be gone.

        Returns:
            How many there were.

        Raises:
            StoreError: The server did not answer; the leases end with their expiry at the latest.
        """
        return int(self._run(RELEASE_DEAD, lock, owner_start, milliseconds(at_least)))

    def renew(
        self, leases: Sequence[tuple[str, str, float]], *, within: float
    ) -> list[bool | StoreError]:
        """
        Reset the expiry of many leases in one pipelined round trip, on a connection of its own.

        Called by one thread only, the watchdog's, which has its own idea of when to try again:
        nothing is resent here.

        Args:
            leases: Name of the lock in Redis, owner, and expiry in seconds from now, each.
            within: Seconds for the connection, where there is none yet, and for the first reply.

        Returns:
            For each lease in turn: True renewed, False no longer held, or the error that the
            server answered for this one.

        Raises:
            StoreError: The server did not answer; each lease may have been renewed or not.
        """
        connection, self._renewing = self._renewing, None
        if connection is None:
            connection = self._new_connection()
            # For the handshake too, and for the rest of a batch once its first reply has come.
            connection.socket_connect_timeout = connection.socket_timeout = within
        try:
            replies = self._renew_on(connection, leases, within)
            if any(isinstance(reply, NoScriptError) for reply in replies):
                connection.send_command("SCRIPT", "LOAD", RENEW.text)
                connection.read_response()
                replies = self._renew_on(connection, leases, within)
        except (RedisError, OSError) as exc:
            connection.disconnect()
            raise self._error(exc) from exc
        except BaseException:
            connection.disconnect()
            raise
        self._renewing = connection
        return [
            self._error(reply) if isinstance(reply, Exception) else reply == 1 for reply in replies
        ]

    def _renew_on(
        self, connection: redis.Connection, leases: Iterable[tuple[str, str, float]], within: float
    ) -> list[Any]:
        commands = [
            connection.pack_command(b"EVALSHA", RENEW.sha, 1, lock, owner, milliseconds(ttl))
            for lock, owner, ttl in leases
        ]
        connection.send_packed_command([b"".join(map(b"".join, commands))], check_health=False)
        if not connection.can_read(timeout=within):
            raise redis.TimeoutError(f"no reply within {within:.2f} s")
        return [_read(connection) for _ in commands]

    def ping(self) -> dict[str, Any]:
        """
        Ask the server who it is.

        Returns:
            The fields of ``INFO``'s server, memory and replication sections, as text.

        Raises:
            StoreError: It did not answer, or refused.
        """
        info = self._send(b"INFO").decode()
        return dict(line.split(":", 1) for line in info.splitlines() if ":" in line)

    def close(self) -> None:
        """Close the idle connections."""
        self._close_idle()
        if self._renewing is not None:
            self._renewing.disconnect()

    def _run(self, script: Script, lock: str, *arguments: str | int) -> Any:
        try:
            return self._send(b"EVALSHA", script.sha, 1, lock, *arguments)
        except NoScriptError:
            return self._send(b"EVAL", script.text, 1, lock, *arguments)

    def _send(self, *command: str | bytes | int) -> Any:
        for attempt in range(1 + RESENDS):
            try:
                connection = self._idle.pop()
            except IndexError:
                connection = self._new_connection()
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

    def _close_idle(self) -> None:
        with contextlib.suppress(IndexError):  # other threads take from the stack, too
            while True:
                self._idle.pop().disconnect()

    def _error(self, exc: Exception) -> StoreError:
        return StoreError(self.server, str(exc) or type(exc).__name__)


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
