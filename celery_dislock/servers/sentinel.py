"""Use a lock server that Sentinels watch: only replies of the current master count.

A master that was paused and replaced does not know that.  When it resumes, it is still a master on
all its old connections, until a Sentinel reaches it some seconds later.  What is written to it in
that time is lost.  So a reply counts only if the Sentinels name the server as the master, in an
answer that is at most CONFIRMED_FOR old.  If their last answer is older, they are asked when the
reply arrives.  This needs no background thread, and no proxy between client and server.

One Sentinel may lag behind the others, or be cut off together with the old master.  So all
Sentinels are asked, and the answers of the highest epoch count: each failover has a higher epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import redis

from celery_dislock.clock import monotonic
from celery_dislock.config.urls import group
from celery_dislock.exceptions import ForbiddenError, SettingsError, StoreError
from celery_dislock.redaction import Ours
from celery_dislock.servers.connecting import BLOCKING, connection_maker
from celery_dislock.servers.connections import SOCKET_TIMEOUT, Wire, is_answer, only_reply
from celery_dislock.servers.server import Outage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from celery_dislock.servers.connecting import Driver
    from celery_dislock.servers.connections import Connect, Connection

    Address = tuple[str, int]

CONFIRMED_FOR = 0.5  # seconds for which an answer of the Sentinels counts
LEFT_ALONE = 10  # a Sentinel that fails is skipped for this many times the failure's duration

logger = logging.getLogger("celery_dislock")


class NoMaster(Ours, redis.ConnectionError):
    """The Sentinels name no master, or another one than the server that answered."""


class NoSentinel(NoMaster, redis.TimeoutError):
    """No Sentinel gave an answer that counts, and at least one timed out."""


class SentinelReply(NamedTuple):
    """What one Sentinel says about the master."""

    epoch: int  # of the failover that made this server the master
    address: Address | None  # None: the master is down
    is_replaced: bool = False  # another server is about to become the master


class Sentinels:
    """
    The Sentinels of one master.  Safe to use from many threads or greenlets.

    Args:
        wires: The connections to each Sentinel of the master.
        master: Name that the Sentinels have for the master.
        others: Number of other Sentinels that a Sentinel must know for its answer to count.
        timeout: Seconds to wait for all Sentinels together.
        clock: Monotonic clock in seconds.
        driver: How it waits.
    """

    def __init__(
        self,
        wires: Mapping[Address, Wire],
        master: str,
        *,
        others: int = 0,
        timeout: float = SOCKET_TIMEOUT,
        clock: Callable[[], float] = monotonic,
        driver: Driver = BLOCKING,
    ) -> None:
        self._wires = wires
        self._left_alone_until = dict.fromkeys(wires, 0.0)
        self._master = master
        self._others = others
        self._timeout = timeout
        self._clock = clock
        # One thread asks at a time, and confirm() in the others uses its answer.  Reentrant: a
        # signal handler that interrupts the asking thread and uses locks must be able to ask.
        self._mutex = driver.mutex()
        self._named: Address | None = None
        self._holds_until = 0.0
        self._outage = Outage()

    def find(self, within: float | None = None) -> Address:
        """
        Ask the Sentinels for the master, to connect to it.

        Args:
            within: Seconds for the answer; None: the *timeout* of this object.

        Raises:
            redis.ConnectionError: No Sentinel answered, or they name no master.
        """
        return self._alone(within, lambda: self._ask(within))

    def confirm(self, connection: Connection, within: float | None = None) -> None:
        """
        Check that a connection leads to the master.  Asks only if the last answer is too old.

        While no Sentinel answers, the server that was named last counts as the master.

        Args:
            connection: Connection to the server whose reply has arrived.
            within: As for :meth:`find`.

        Raises:
            redis.ConnectionError: Another server is the master, or none is.
        """
        named = self._confirmed() or self._alone(
            within, lambda: self._confirmed() or self._ask(within, or_last=True)
        )
        if (connection.host, connection.port) != named:
            raise NoMaster(f"the Sentinels call {_at(named)} the master now")

    def roll_call(self) -> list[tuple[str, str]]:
        """
        Ask every Sentinel for the master; blocks for the timeout of each that is away.

        Returns:
            Of each Sentinel its address, and why its answer does not count; empty: it does.
        """
        each = self._timeout / len(self._wires)
        return [(_at(wire), _why(self._hear(wire, each))) for wire in self._wires]

    def _hear(self, at: Address, within: float) -> SentinelReply | NoMaster:
        """Ask a Sentinel for the master; return its answer, or why that does not count."""
        began = self._clock()
        asked = [
            ("SENTINEL", subcommand, self._master)
            for subcommand in ("MASTER", "GET-MASTER-ADDR-BY-NAME")
        ]
        try:
            replies = self._wires[at].ask(asked, within=within, again=True)
            state, named = (only_reply([reply]) for reply in replies)
            answer = parse_sentinel_reply(state, named, self._others)
        except StoreError as exc:
            if is_answer(exc):
                forbidden = isinstance(exc, ForbiddenError)
                return NoMaster(exc.reason if forbidden else "knows no such master")
            took = self._clock() - began
            self._left_alone_until[at] = began + took * LEFT_ALONE
            kind = NoSentinel if isinstance(exc.raw, redis.TimeoutError) else NoMaster
            return kind(exc.reason)
        return answer or NoMaster("sees too few other Sentinels")

    def _confirmed(self) -> Address | None:
        """Return the master that was named last, if that answer still counts."""
        return self._named if self._clock() < self._holds_until else None

    def close(self) -> None:
        """Close the connections to the Sentinels."""
        for wire in self._wires.values():
            wire.close()

    def _alone(self, within: float | None, ask: Callable[[], Address]) -> Address:
        """Ask while no other thread does.  A signal handler of the asking thread may ask, too."""
        if within is None:
            with self._mutex:  # released wherever a signal handler raises
                return ask()
        # A limit is given by background threads, which run no signal handlers, and at worker start.
        if not self._mutex.acquire(timeout=within):
            raise NoSentinel("the Sentinels have not answered yet")
        try:
            return ask()
        finally:
            self._mutex.release()

    def _ask(self, within: float | None, *, or_last: bool = False) -> Address:
        began = self._clock()
        heard = self._ask_all(within)
        answers = [answer for answer in heard.values() if isinstance(answer, SentinelReply)]
        errors = "; ".join(
            f"{_at(at)}: {why}" for at, answer in heard.items() if (why := _why(answer))
        )
        if answers:
            if self._outage.ends():
                #: INFO: A Sentinel has answered.
                logger.info("The Sentinels answer again.")
            self._named = choose(answers)
            self._holds_until = began + CONFIRMED_FOR
            if self._named is not None:
                return self._named
        elif or_last and self._named is not None:
            took = self._clock() - began
            self._holds_until = began + max(CONFIRMED_FOR, took * LEFT_ALONE)
            if self._outage.begins():
                #: WARNING: Locks work, but a failover would not be noticed, and new connections
                #: cannot be made. -> Check the Sentinels.
                logger.warning(
                    "No Sentinel answers; %s counts as the master until one does: %s",
                    *(_at(self._named), errors),
                )
            return self._named
        slow = not answers and any(isinstance(answer, NoSentinel) for answer in heard.values())
        kind = NoSentinel if slow else NoMaster
        raise kind(f"no Sentinel names a master {self._master!r} ({errors})")

    def _ask_all(self, within: float | None) -> dict[Address, SentinelReply | NoMaster]:
        """Ask the Sentinels that did not fail recently; the others only if none of them answers."""
        now = self._clock()
        until = now + min(self._timeout, self._timeout if within is None else within)
        each = (until - now) / len(self._wires)
        heard: dict[Address, SentinelReply | NoMaster] = {}
        answered = failed = False
        for at in sorted(self._wires, key=self._left_alone_until.__getitem__):
            is_left_alone = self._left_alone_until[at] > now
            if (answered and is_left_alone) or (failed and self._clock() >= until):
                continue
            heard[at] = answer = self._hear(at, each)
            answered = answered or isinstance(answer, SentinelReply)
            failed = failed or bool(_why(answer))
        return heard


def _why(heard: SentinelReply | NoMaster) -> str:
    """Say why a Sentinel names no master; empty: it names one."""
    if isinstance(heard, NoMaster):
        return str(heard)
    return "" if heard.address else "says that the master is down"


def choose(answers: Sequence[SentinelReply]) -> Address | None:
    """Return the master that the answers of the highest epoch name; None: they name none."""
    newest = max((answer.epoch for answer in answers), default=0)
    heard = [answer for answer in answers if answer.epoch == newest]
    if any(answer.is_replaced for answer in heard):
        return None
    return next((answer.address for answer in heard if answer.address), None)


def parse_sentinel_reply(state: Any, named: Sequence[bytes], others: int) -> SentinelReply | None:
    """
    Parse the answer of one Sentinel.

    Args:
        state: Reply to SENTINEL MASTER.  Its address changes when the failover is over.
        named: Reply to SENTINEL GET-MASTER-ADDR-BY-NAME.  It changes earlier, as soon as the next
            master is a master.
        others: Number of other Sentinels that this one must know for its answer to count.

    Returns:
        The answer; None if it does not count.
    """
    pairs = state.items() if isinstance(state, dict) else zip(*[iter(state)] * 2, strict=True)
    fields = {bytes(name): value for name, value in pairs}
    if int(fields[b"num-other-sentinels"]) < others:
        return None
    flags = set(fields[b"flags"].split(b","))
    is_next = list(named) != [fields[b"ip"], fields[b"port"]]
    is_up = is_next or (b"master" in flags and not {b"s_down", b"o_down"} & flags)
    host, port = named
    return SentinelReply(
        int(fields[b"config-epoch"]),
        (host.decode(), int(port)) if is_up else None,
        is_replaced=b"failover_in_progress" in flags and not is_next,
    )


def _at(address: Address) -> str:
    return "{}:{}".format(*address)


def watched(url: str, options: Mapping[str, Any], driver: Driver) -> tuple[str, Connect, Sentinels]:
    """
    Return the name of a sentinel:// URL, a function that connects to its master, and the Sentinels.

    Args:
        url: ``sentinel://[user:password@]host:port;sentinel://host:port/db``.  User and password
            are those of the Redis servers, not of the Sentinels.
        options: kombu's ``master_name``, ``sentinel_kwargs`` and ``min_other_sentinels``; the rest
            are keyword arguments of redis-py's connections to the master.
        driver: How it waits.

    Raises:
        SettingsError: The URL or an option cannot be used.
    """
    name, servers, addresses = group(url)
    options = dict(options)
    master, asking = options.pop("master_name", None), options.pop("sentinel_kwargs", {})
    others = options.pop("min_other_sentinels", 0)
    setting = "dislock_transport_options"
    if not master or not isinstance(master, str):
        remedy = "sentinel:// needs 'master_name', the name that the Sentinels have for the master"
        raise SettingsError("app.conf", setting, sorted(options), remedy)
    if not isinstance(asking, Mapping):
        raise SettingsError("app.conf", setting, "sentinel_kwargs", "give a dict of options")
    make = connection_maker(name, servers, options, driver)
    patience = options.get("socket_timeout") or SOCKET_TIMEOUT
    # All Sentinels together get the timeout of one server, unless sentinel_kwargs has one.
    each = asking.get("socket_timeout") or patience / len(addresses)
    limits = {"socket_timeout": each, "socket_connect_timeout": each}
    reach = connection_maker(name, "redis://", {**limits, **asking}, driver)
    sentinels = Sentinels(
        {at: Wire(_at(at), partial(reach, host=at[0], port=at[1])) for at in addresses},
        master,
        others=others,
        timeout=each * len(addresses),
        driver=driver,
    )

    def connect(within: float | None) -> Any:
        host, port = sentinels.find(within)
        return make(host=host, port=port)

    return name, connect, sentinels
