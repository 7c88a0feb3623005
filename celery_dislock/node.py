"""The wire to one Redis process.

Everything that is sent is safe to send twice, so a command whose reply was lost is simply sent
again on a fresh connection, a few times, before the server counts as away.  So does one that says
it is a replica: it was the master once, and a fresh connection may lead to the one that is now.

Connections are made by redis-py and used one command at a time, without its client and pool on
top: those cost more per command than the command.  An idle connection waits on a stack; there are
never more of them than callers were at once in a command.  A connection on which anything went
wrong, an exception raised by a signal handler included, is closed and never used again: the next
reply on it might belong to the command before.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError, ResponseError
from redis.retry import Retry

from celery_dislock.exceptions import SettingsError, StoreError
from celery_dislock.scripts import ACQUIRE, RELEASE
from celery_dislock.urls import redis_options, redis_url, without_password

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from celery_dislock.scripts import Script

    Call = tuple[str | int, ...]
    # Given the seconds it may take to find the server, or None for the options' own.
    Connect = Callable[[float | None], redis.Connection]

RESENDS = 2  # times a command is sent again when its reply is lost
RESEND_PAUSE = 0.1  # seconds before the second resend; the first one follows at once
SOCKET_TIMEOUT = 2.0  # seconds for a reply, and for a connection, before it counts as lost
REPLICAS_WITHIN = 1.0  # seconds for the replicas to have an acquisition

# What a server that is away raises: redis-py's errors, and its retry of a plain OSError.
AWAY = (redis.ConnectionError, redis.TimeoutError, OSError)


class Node:
    """One Redis process, and the connections to it.

    Safe to use from many threads or greenlets, but for the methods that end in ``_many``.

    Args:
        name: What errors call it.
        connect: Makes a connection; it need not connect yet.
        pause: Called with seconds to wait between two attempts.
        resends: Times a command is sent again when its reply is lost.
        min_replicas: An acquisition counts only when so many replicas have it.
    """

    def __init__(
        self,
        name: str,
        connect: Connect,
        *,
        pause: Callable[[float], None] = time.sleep,
        resends: int = RESENDS,
        min_replicas: int = 0,
    ) -> None:
        self.name = name
        self._connect = connect
        self._pause = pause
        self._resends = resends
        self._min_replicas = min_replicas
        self._idle: list[redis.Connection] = []
        self._batching: redis.Connection | None = None

    def run(
        self, script: Script, keys: Sequence[str], *arguments: str | int, asking: bool = False
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
            StoreError: No reply came, or an error; the script may have run.
        """
        named = (len(keys), *keys, *arguments)
        before = (b"ASKING",) if asking else None
        then = self._await_replicas if self._min_replicas and script is ACQUIRE else None
        try:
            try:
                return self._exchange((b"EVALSHA", script.sha, *named), before, then)
            except NoScriptError:
                return self._exchange((b"EVAL", script.text, *named), before, then)
        except _TooFewReplicas as exc:
            self.run(RELEASE, keys, arguments[0], 0, asking=asking)
            raise self._error(exc) from exc

    def together(self, keys: Sequence[str]) -> list[Sequence[str]]:
        """Group keys, in their order, by what one script can be given: here all of them."""
        return [keys]

    def send(self, *command: str | bytes | int) -> Any:
        """
        Send a command; see :meth:`run`.

        Raises:
            StoreError: No reply came, or an error; the command may have been carried out.
        """
        return self._exchange(command)

    def _exchange(
        self,
        command: tuple[str | bytes | int, ...],
        before: tuple[bytes, ...] | None = None,
        then: Callable[[redis.Connection, Any], None] | None = None,
    ) -> Any:
        for attempt in range(1 + self._resends):
            connection: redis.Connection | None = None
            try:
                connection = self._take()
                if before:
                    connection.send_command(*before)
                    connection.read_response()
                packed = connection.pack_command(*command)
                connection.send_packed_command(packed, check_health=False)
                reply = _read(connection)
                if then:
                    then(connection, reply)
            except (NoScriptError, _TooFewReplicas):
                self._idle.append(connection)  # type: ignore[arg-type]  # something answered
                raise
            except AWAY as exc:
                _close(connection)
                self.close_idle()  # they are from before the server went away, too
                if attempt == self._resends:
                    raise self._error(exc) from exc
                self._pause(attempt * RESEND_PAUSE)
            except RedisError as exc:
                _close(connection)
                raise self._error(exc) from exc
            except BaseException:
                _close(connection)
                raise
            else:
                self._idle.append(connection)
                return reply
        raise AssertionError("unreachable")  # pragma: no cover

    def _await_replicas(self, connection: redis.Connection, reply: Any) -> None:
        """See that replicas have what was granted; asked where it was written, as WAIT wants it."""
        if reply[0] != 1:
            return
        patience = min(REPLICAS_WITHIN, (connection.socket_timeout or REPLICAS_WITHIN * 2) / 2)
        connection.send_command(b"WAIT", self._min_replicas, int(patience * 1000))
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

        Args:
            key: Name of the list.
            seconds: > 0, a fraction allowed.
            asking: See :meth:`run`.

        Returns:
            The element; None where there was none.

        Raises:
            StoreError: No reply came, or an error; an element may have been taken.
        """
        connection: redis.Connection | None = None
        try:
            connection = self._take()
            if asking:
                connection.send_command(b"ASKING")
                connection.read_response()
            packed = connection.pack_command(b"BLPOP", key, seconds)
            connection.send_packed_command(packed, check_health=False)
            connection.can_read(timeout=seconds + SOCKET_TIMEOUT)
            reply = _read(connection)
        except (RedisError, OSError) as exc:
            _close(connection)
            raise self._error(exc) from exc
        except BaseException:
            _close(connection)
            raise
        self._idle.append(connection)
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
        self.send_many(script, calls, within=within)
        return self.read_many(script, calls, within=within)

    def send_many(self, script: Script, calls: Sequence[Call], *, within: float) -> None:
        """Do the first half of :meth:`run_many`; nothing may come before the second."""
        with self._using_batching():
            if self._batching is None:
                connection = self._batching = self._connect(within)
                # For the handshake too, and for the rest of a batch once its first reply has come.
                connection.socket_connect_timeout = connection.socket_timeout = within
            _send_all(self._batching, script, calls)

    def read_many(self, script: Script, calls: Sequence[Call], *, within: float) -> list[Any]:
        """Do the second half of :meth:`run_many`."""
        with self._using_batching():
            connection = self._batching
            if connection is None:
                raise redis.ConnectionError("nothing was sent")
            replies = _read_all(connection, calls, within)
            if any(isinstance(reply, NoScriptError) for reply in replies):
                connection.send_command("SCRIPT", "LOAD", script.text)
                connection.read_response()
                _send_all(connection, script, calls)
                replies = _read_all(connection, calls, within)
        return [self._error(r) if isinstance(r, Exception) else r for r in replies]

    def ask(self, *command: str, within: float | None) -> Any:
        """
        Send a command on a connection of its own, once; it may take *within* seconds to answer.

        Raises:
            StoreError: No reply came, or an error.
        """
        connection: redis.Connection | None = None
        try:
            connection = self._connect(within)
            if within is not None:
                connection.socket_connect_timeout = connection.socket_timeout = within
            connection.send_command(*command)
            return connection.read_response(disable_decoding=True)
        except (RedisError, OSError) as exc:
            raise self._error(exc) from exc
        finally:
            _close(connection)

    def close(self) -> None:
        """Close the connections that are not in use."""
        self.close_idle()
        batching, self._batching = self._batching, None
        _close(batching)

    @contextlib.contextmanager
    def _using_batching(self) -> Iterator[None]:
        try:
            yield
        except BaseException as exc:
            connection, self._batching = self._batching, None
            _close(connection)
            if isinstance(exc, (RedisError, OSError)):
                raise self._error(exc) from exc
            raise

    def _take(self) -> redis.Connection:
        try:
            return self._idle.pop()
        except IndexError:
            return self._connect(None)

    def close_idle(self) -> None:
        """Close the connections that wait for a command."""
        with contextlib.suppress(IndexError):  # other threads take from the stack, too
            while True:
                self._idle.pop().disconnect()

    def _error(self, exc: Exception) -> StoreError:
        error = StoreError(self.name, str(exc) or type(exc).__name__)
        error.__cause__ = exc
        return error


class _TooFewReplicas(Exception):  # noqa: N818  # no error yet: the lock is given back first
    pass


def connection_maker(
    name: str, url: str, options: Mapping[str, Any]
) -> Callable[..., redis.Connection]:
    """
    Return what makes the connections of this URL; its keyword arguments win over the URL's.

    Args:
        name: The setting's value as a message may show it.
        url: redis://, rediss:// or unix://; Celery's redis+socket:// is understood.
        options: Keyword arguments of redis-py's Connection, on top of the URL's; ``ssl`` makes a
            redis:// a rediss://, as in Celery's ``broker_use_ssl``.

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
        pool.connection_class(**pool.connection_kwargs)
    except TypeError as exc:  # unknown to the kind of connection that the URL asks for
        option = "dislock_transport_options"
        raise SettingsError("app.conf", option, sorted(settings), str(exc)) from exc
    except (ValueError, RedisError):
        # Not from its cause, which may quote the password.
        remedy = "give redis://, rediss:// or unix://, with special characters as %XX"
        raise SettingsError("app.conf", "dislock_url", name, remedy) from None
    kind, arguments = pool.connection_class, pool.connection_kwargs
    return lambda **more: kind(**{**arguments, **more})


def single(
    url: str, options: Mapping[str, Any], *, pause: Callable[[float], None], min_replicas: int = 0
) -> Node:
    """Return the one server of this URL."""
    name = without_password(url)
    make = connection_maker(name, url, options)
    return Node(name, lambda _within: make(), pause=pause, min_replicas=min_replicas)


def demoted(exc: BaseException) -> bool:
    """Tell whether the server says it is a replica; before Redis 7 a script's error hides it."""
    return isinstance(exc, redis.ReadOnlyError) or (
        isinstance(exc, ResponseError) and "READONLY" in str(exc)
    )


def _read(connection: redis.Connection) -> Any:
    try:
        return connection.read_response(disable_decoding=True)
    except ResponseError as exc:
        if demoted(exc):
            raise redis.ConnectionError("it is a replica, and no longer the master") from exc
        raise


def _send_all(connection: redis.Connection, script: Script, calls: Sequence[Call]) -> None:
    commands = [connection.pack_command(b"EVALSHA", script.sha, 1, *call) for call in calls]
    connection.send_packed_command([b"".join(map(b"".join, commands))], check_health=False)


def _read_all(connection: redis.Connection, calls: Sequence[Call], within: float) -> list[Any]:
    if not connection.can_read(timeout=within):
        raise redis.TimeoutError(f"no reply within {within:.2f} s")
    return [_read_one(connection) for _ in calls]


def _read_one(connection: redis.Connection) -> Any:
    try:
        return _read(connection)
    except AWAY:
        raise
    except ResponseError as exc:
        return exc


def _close(connection: redis.Connection | None) -> None:
    if connection is not None:
        connection.disconnect()
