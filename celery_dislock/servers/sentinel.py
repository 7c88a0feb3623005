"""A lock server that Sentinels watch: what counts is the answer of the one they call master.

A master that was stopped and replaced does not know it.  When it goes on, it is a master on every
connection that it had, for the seconds until a Sentinel reaches it, and what is written there is
lost.  So a reply counts only when the Sentinels have said at most CONFIRMED_FOR before it that the
server is the master.  They are asked when their last answer is older, and not while nobody sends
anything: no thread, and nothing between a command and its server.

One Sentinel may be behind the others, or cut off together with the old master.  All are asked, and
the answer of the highest epoch holds: each failover has a higher one.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import redis
from redis.backoff import NoBackoff
from redis.exceptions import NoPermissionError, RedisError, ResponseError
from redis.retry import Retry

from celery_dislock.config.urls import HIDDEN, group, redis_options, without_password
from celery_dislock.exceptions import SettingsError
from celery_dislock.redaction import Ours, reason_of
from celery_dislock.servers.connections import (
    SOCKET_TIMEOUT,
    close,
    connect_within,
    connection_maker,
    read,
    unknown_option,
)
from celery_dislock.servers.node import Node

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    Address = tuple[str, int]

NAMED = 5  # Sentinels whose answers an error tells
CONFIRMED_FOR = 0.5  # seconds for which an answer of the Sentinels holds
LEFT_ALONE = 10  # times as long as its failure took, one that does not answer is not asked again

logger = logging.getLogger("celery_dislock")


class NoMaster(Ours, redis.ConnectionError):  # reads as what is the case
    """The Sentinels name no master, or another than was asked."""


class NoSentinel(NoMaster, redis.TimeoutError):
    """One of them did not answer in time, and none named a master."""


class Said(NamedTuple):
    """What one Sentinel says of the master."""

    epoch: int  # of the failover that made it the master
    address: Address | None  # None: it is down
    is_replaced: bool = False  # another is about to become the master


class Asked:
    """
    One Sentinel, and the connection to it.

    Args:
        address: Where it is.
        connect: Makes a connection; it need not connect yet.
    """

    def __init__(self, address: Address, connect: Callable[[], Any]) -> None:
        self.address = address
        self.left_alone_until = 0.0
        self._connect = connect
        self._connection: redis.Connection | None = None

    def ask(self, master: str, within: float, others: int = 0) -> Said | None:
        """
        Ask who is master; blocks for a round trip, and *within* seconds at most.

        Returns:
            Its answer; None where it knows fewer than so many *others*.

        Raises:
            redis.RedisError, OSError: It did not answer, or does not know the master.
        """
        kept, self._connection = self._connection, None
        if kept is not None:
            with contextlib.suppress(redis.ConnectionError, OSError):  # cut: another is made
                return self._ask(kept, master, within, others)
        connection = connect_within(lambda _: self._connect(), within)
        return self._ask(connection, master, within, others)

    def _ask(
        self, connection: redis.Connection, master: str, within: float, others: int
    ) -> Said | None:
        try:
            for command in ("MASTER", "GET-MASTER-ADDR-BY-NAME"):
                connection.send_command("SENTINEL", command, master, check_health=False)
            state, named = read(connection, within), read(connection, within)
        except BaseException:
            close(connection)
            raise
        self._connection = connection
        return said(state, named, others)

    def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        close(connection)


class Sentinels:
    """
    Who is master, as the Sentinels say.  Safe to use from many threads or greenlets.

    Args:
        sentinels: All of them.
        master: The name that they have for it.
        others: How many others one must know for its answer to count.
        timeout: Seconds to wait for all of them together.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        sentinels: Iterable[Asked],
        master: str,
        *,
        others: int = 0,
        timeout: float = SOCKET_TIMEOUT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sentinels = tuple(sentinels)
        self._master = master
        self._others = others
        self._timeout = timeout
        self._clock = clock
        # One asks, and the others have its answer.  A signal handler that uses locks in the middle
        # of that asks, too.
        self._mutex = threading.RLock()
        self._named: Address | None = None
        self._holds_until = 0.0
        self._silent = False

    def find(self, within: float | None = None) -> Address:
        """
        Ask who is master, for a new connection to it.

        Args:
            within: Seconds that it may take; None: the timeout.

        Raises:
            redis.ConnectionError: None of them answered, or they name no master.
        """
        return self._alone(within, lambda: self._ask(within))

    def confirm(self, connection: redis.Connection, within: float | None = None) -> None:
        """
        See that a connection leads to the master; most often the last answer tells.

        While no Sentinel answers, the last one that was named is taken for the master.

        Args:
            connection: To the server whose reply has come.
            within: As for :meth:`find`.

        Raises:
            redis.ConnectionError: Another is the master, or none.
        """
        named = self._confirmed()
        if named is None:
            named = self._alone(
                within, lambda: self._confirmed() or self._ask(within, or_last=True)
            )
        if (connection.host, connection.port) != named:
            raise NoMaster(f"the Sentinels call {_at(named)} the master now")

    def _confirmed(self) -> Address | None:
        """Return who was named of late."""
        return self._named if self._clock() < self._holds_until else None

    def close(self) -> None:
        """Close the connections to the Sentinels."""
        with self._mutex:
            self._named = None
            for sentinel in self._sentinels:
                sentinel.close()

    def _alone(self, within: float | None, ask: Callable[[], Address]) -> Address:
        """Ask while no other thread does; a signal handler of the asking thread may ask, too."""
        if within is None:
            with self._mutex:  # which frees it wherever a signal handler raises
                return ask()
        if not self._mutex.acquire(timeout=within):  # for a thread, which no signal reaches
            raise NoSentinel("the Sentinels have not answered yet")
        try:
            return ask()
        finally:
            self._mutex.release()

    def _ask(self, within: float | None, *, or_last: bool = False) -> Address:
        began = self._clock()
        answers, errors, slow = self._ask_all(within)
        if not answers and or_last and self._named is not None:
            took = self._clock() - began
            self._holds_until = began + max(CONFIRMED_FOR, took * LEFT_ALONE)
            if not self._silent:
                self._silent = True
                logger.warning(
                    "No Sentinel answers, and %s counts as the master until one does: %s",
                    _at(self._named),
                    "; ".join(errors),
                )
            return self._named
        if answers and self._silent:
            self._silent = False
            logger.info("The Sentinels answer again.")
        named = choose(answers)
        if answers:
            self._named = named
        if named is None:
            shown = errors[:NAMED] + ([f"and {len(errors) - NAMED} more"] if errors[NAMED:] else [])
            kind = NoSentinel if slow and not answers else NoMaster
            raise kind(f"no Sentinel names a master {self._master!r} ({'; '.join(shown)})")
        self._holds_until = began + CONFIRMED_FOR
        return named

    def _ask_all(self, within: float | None) -> tuple[list[Said], list[str], bool]:
        """
        Ask those that have answered of late; the others where none of these does.

        Returns:
            The answers; for a message, why each of the others does not name a master; and whether
            one of them did not answer in time.
        """
        now = self._clock()
        until = now + min(self._timeout, self._timeout if within is None else within)
        each = (until - now) / len(self._sentinels)
        answers: list[Said] = []
        errors: list[str] = []
        slow = False
        for sentinel in sorted(self._sentinels, key=lambda one: one.left_alone_until > now):
            began = self._clock()
            if (answers and sentinel.left_alone_until > now) or (errors and began >= until):
                continue
            try:
                answer = sentinel.ask(self._master, each, self._others)
            except (RedisError, OSError) as exc:
                why = reason_of(exc)
                if isinstance(exc, NoPermissionError):
                    pass
                elif isinstance(exc, ResponseError):
                    why = "knows no such master"
                else:
                    slow = slow or isinstance(exc, redis.TimeoutError)
                    took = self._clock() - began
                    sentinel.left_alone_until = began + took * LEFT_ALONE
                errors.append(f"{_at(sentinel.address)}: {why}")
                continue
            if answer is None:
                errors.append(f"{_at(sentinel.address)}: sees too few other Sentinels")
                continue
            answers.append(answer)
            if answer.address is None:
                errors.append(f"{_at(sentinel.address)}: calls it down")
        return answers, errors, slow


def choose(answers: Sequence[Said]) -> Address | None:
    """Return who is master by the answers of the highest epoch; None: nobody."""
    newest = max((one.epoch for one in answers), default=0)
    heard = [one for one in answers if one.epoch == newest]
    if any(one.is_replaced for one in heard):
        return None
    return next((one.address for one in heard if one.address), None)


def said(state: Any, named: Sequence[bytes], others: int) -> Said | None:
    """
    Read what a Sentinel says.

    Args:
        state: The reply to SENTINEL MASTER, whose address changes when the failover is over.
        named: The reply to SENTINEL GET-MASTER-ADDR-BY-NAME: it is another from the moment at
            which the next master is one.
        others: How many other Sentinels it must know for its answer to count.
    """
    pairs = state.items() if isinstance(state, dict) else zip(*[iter(state)] * 2, strict=True)
    fields = {bytes(name): value for name, value in pairs}
    if int(fields[b"num-other-sentinels"]) < others:
        return None
    flags = set(fields[b"flags"].split(b","))
    is_next = list(named) != [fields[b"ip"], fields[b"port"]]
    is_up = is_next or (b"master" in flags and not {b"s_down", b"o_down"} & flags)
    host, port = named
    return Said(
        int(fields[b"config-epoch"]),
        (host.decode(), int(port)) if is_up else None,
        is_replaced=b"failover_in_progress" in flags and not is_next,
    )


def _at(address: Address) -> str:
    return "{}:{}".format(*address)


def watched(
    url: str, options: Mapping[str, Any], *, pause: Callable[[float], None], min_replicas: int = 0
) -> Node:
    """
    Return the server that these Sentinels call master, whichever it is at the time.

    Args:
        url: ``sentinel://[user:password@]host:port;sentinel://host:port/db``; user and password are
            the Redis servers', not the Sentinels'.
        options: kombu's ``master_name``, ``sentinel_kwargs`` and ``min_other_sentinels``; the rest
            are keyword arguments of redis-py's connections to the master.
        pause: See :class:`celery_dislock.servers.node.Node`.
        min_replicas: See there, too.

    Raises:
        SettingsError: The URL or an option cannot be used.
    """
    options = dict(options)
    master = options.pop("master_name", None)
    asking = options.pop("sentinel_kwargs", None) or {}
    if not isinstance(asking, Mapping):
        shown = {"sentinel_kwargs": HIDDEN}
        raise SettingsError("app.conf", "dislock_transport_options", shown, "give a dict")
    asking = redis_options(asking)
    others = options.pop("min_other_sentinels", 0)
    try:
        name, servers, addresses = group(url)
    except ValueError as exc:
        raise SettingsError("app.conf", "dislock_url", without_password(url), str(exc)) from None
    if not master or not isinstance(master, str):
        raise SettingsError(
            "app.conf",
            "dislock_transport_options",
            sorted(options),
            "sentinel:// needs 'master_name', the name that the Sentinels have for the master",
        )
    make = connection_maker(name, servers, options)
    patience = options.get("socket_timeout") or SOCKET_TIMEOUT
    # All of them together are given as long as one server, unless the time of each is given.
    each = asking.setdefault("socket_timeout", patience / len(addresses))
    asking.setdefault("socket_connect_timeout", each)
    asking.setdefault("retry", Retry(NoBackoff(), 0))
    try:
        pools = [redis.Redis(host, port, **asking).connection_pool for host, port in addresses]
    except TypeError as exc:
        raise SettingsError(
            "app.conf", "dislock_transport_options", "sentinel_kwargs", unknown_option(exc)
        ) from None
    sentinels = Sentinels(
        (Asked(at, pool.make_connection) for at, pool in zip(addresses, pools, strict=True)),
        master,
        others=others,
        timeout=each * len(addresses),
    )

    def connect(within: float | None) -> redis.Connection:
        host, port = sentinels.find(within)
        return make(host=host, port=port)

    return Node(name, connect, pause=pause, min_replicas=min_replicas, watched_by=sentinels)
