"""Send the same command to several independent servers at once.

The command is sent to all servers before the first reply is read, so five servers take little
longer than one.

A server that fails counts as away for a while.  It is asked only after the others have answered, at
intervals, and gets little time to answer.  Both the interval and the time to answer double with
each failure.  So a server that is only slow comes back, and a dead one costs callers about the same
share of their time however long it is away.  If too few of the others answer, or what they say
does not decide, all servers are asked.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any, TypeVar

from celery_dislock.clock import monotonic
from celery_dislock.config.urls import without_password
from celery_dislock.exceptions import DamagedLockError, StoreError, UnreachableError
from celery_dislock.servers.connecting import BLOCKING, connection_maker
from celery_dislock.servers.connections import Wire, one_of
from celery_dislock.servers.server import Member

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import redis

    from celery_dislock.scripts import Script
    from celery_dislock.servers.connecting import Driver
    from celery_dislock.servers.connections import Command

    # Returns whether these replies of a majority decide, whatever the other servers say.
    Decides = Callable[[Sequence[Any]], bool]

RETRY_AFTER = 0.5  # seconds until a server that failed is asked again; doubled each time
GRACE = 0.05  # seconds that it then gets, after the others have answered; doubled each time
DOUBLED = 4  # most times that both are doubled

LEAST = 0.05  # seconds for a request that is sent although the time is used up

Key = TypeVar("Key")

logger = logging.getLogger("celery_dislock")


def ask_all(
    asked: Mapping[Key, tuple[Wire, Sequence[Command]]],
    script: Script | None = None,
    *,
    within: float,
    again: bool = False,
    undo: Callable[[], Command] | None = None,
) -> dict[Key, Any]:
    """
    Ask several servers at once.

    All are sent to, in this order, before the first reply is read.  So one that is away does not
    delay the others.  But connecting to a server that is away may use up half of the time that is
    left: such servers should come last.

    Args:
        asked: The connections and the commands of each server, under what identifies it.
        script: See :meth:`celery_dislock.servers.connections.Wire.finish`, as for the others.
        within: Seconds for all servers together.
        again: See there.
        undo: See there.

    Returns:
        The replies of each server, or a StoreError if it did not answer.
    """
    until = monotonic() + within
    sent: dict[Key, redis.Connection] = {}
    replies: dict[Key, Any] = {}

    def read(server: Key, left: float) -> list[Any]:
        wire, commands = asked[server]
        return wire.finish(sent.pop(server), commands, script, within=left, again=again, undo=undo)

    try:
        for server, (wire, commands) in asked.items():
            try:
                # Half of the time left, so that a server that is away leaves some for the others.
                left = max((until - monotonic()) / 2, LEAST)
                sent[server] = wire.start(commands, within=left, again=again)
            except StoreError as exc:
                replies[server] = exc
        for server in list(sent):
            try:
                replies[server] = read(server, until - monotonic())
            except StoreError as exc:
                replies[server] = exc
    except BaseException:  # an interruption; nobody else would read what the others reply
        for server in list(sent):
            with contextlib.suppress(BaseException):
                read(server, 0.0)
        raise
    return replies


def by_majority(answered: Sequence[Any]) -> bool:  # noqa: ARG001 -- what they say is no matter
    """Return True: that a majority has answered decides."""
    return True


class Peer:
    """
    One of the servers.

    Args:
        url: See :func:`celery_dislock.servers.connecting.connection_maker`.
        options: Options of its connections; see there.
        clock: Monotonic clock in seconds.
        driver: Makes its connections.

    Attributes:
        name: The URL without its password, for messages.
        wire: The connections to it.
    """

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any],
        clock: Callable[[], float] = monotonic,
        driver: Driver = BLOCKING,
    ) -> None:
        self.name = without_password(url)
        make = connection_maker(self.name, url, options, driver)
        self.wire = Wire(self.name, lambda _within: make())
        self._clock = clock
        self._failures = 0
        self._retry_at = 0.0
        self._error = StoreError(self.name, "it has not been asked")

    @property
    def failing(self) -> bool:
        """Whether the server has failed and not answered since."""
        return self._failures > 0

    @property
    def grace(self) -> float:
        """Seconds that the failing server gets to answer, after the others have answered."""
        return float(GRACE * 2**self._failures)

    def due(self) -> bool:
        """Tell whether it is time to ask the server again; if so, set the next time."""
        now = self._clock()
        if now < self._retry_at:
            return False
        self._failures = min(self._failures + 1, DOUBLED)
        self._retry_at = now + RETRY_AFTER * 2**self._failures
        return True

    def left_alone(self) -> StoreError:
        """Return the error that takes the place of a reply if the server was not asked."""
        return UnreachableError(self.name, self._error.reason)

    def note(self, reply: Any) -> None:
        """Record whether the server answered, and log a change."""
        if isinstance(reply, StoreError) and not isinstance(reply, DamagedLockError):
            self._error = reply
            if not self._failures:
                self._failures = 1
                self._retry_at = self._clock() + RETRY_AFTER
                logger.warning(
                    "Lock server %s failed, the others go on without it: %s",
                    self.name,
                    reply.reason,
                )
        elif self._failures:
            self._failures = 0
            logger.info("Lock server %s answers again.", self.name)

    def send(self, *command: str | bytes | int) -> Any:
        """Send a command to this server alone; see :meth:`Server.send`."""
        return one_of(self.wire.ask((command,), again=True))


class Peers:
    """
    All servers.  Safe to use from many threads or greenlets.

    Args:
        peers: One or more servers, in the order in which all clients ask them.
        clock: Monotonic clock in seconds.

    Attributes:
        majority: The smallest number that is more than half of the servers.
    """

    def __init__(self, peers: Sequence[Peer], clock: Callable[[], float] = monotonic) -> None:
        self._peers = peers
        self._clock = clock
        self.majority = len(peers) // 2 + 1

    def ask(
        self,
        command: Command,
        script: Script | None = None,
        *,
        within: float,
        undo: Callable[[], Command] | None = None,
        decides: Decides = by_majority,
    ) -> list[Any]:
        """
        Send a command to all servers; again, once, if a connection has broken.

        Args:
            command: The command.
            script: What it runs by its digest; None: no script.
            within: Seconds for all replies together.
            undo: Returns a command to send to a server that does not answer in time.  It undoes
                the script there, whenever the server runs both.
            decides: If the answers of a majority do not, no server is left alone.

        Returns:
            The reply of each server or a StoreError, in the order of the servers.
        """

        def run(peers: Sequence[Peer], within: float) -> dict[Peer, Any]:
            asked = {peer: (peer.wire, (command,)) for peer in peers}
            found = ask_all(asked, script, within=within, again=True, undo=undo)
            return {p: one if isinstance(one, StoreError) else one[0] for p, one in found.items()}

        return self._ask(run, within, decides)

    def ask_many(
        self, commands: Sequence[Command], script: Script, *, within: float, decides: Decides
    ) -> list[Any]:
        """
        Send commands that run a script to all servers, in one round trip to each.

        *decides* is asked about lists of replies.

        Returns:
            The list of replies of each server or a StoreError, in the order of the servers.
        """

        def run(peers: Sequence[Peer], within: float) -> dict[Peer, Any]:
            return ask_all({p: (p.wire, commands) for p in peers}, script, within=within)

        return self._ask(run, within, decides)

    def members(self) -> list[Member]:
        """Return the servers; see :meth:`celery_dislock.servers.server.Server.members`."""
        return [Member(peer.name, peer.send, peer.wire) for peer in self._peers]

    def close(self) -> None:
        """Close the connections that are not in use."""
        for peer in self._peers:
            peer.wire.close()

    def _ask(
        self,
        run: Callable[[Sequence[Peer], float], dict[Peer, Any]],
        within: float,
        decides: Decides = by_majority,
    ) -> list[Any]:
        until = self._clock() + within
        replies = run([peer for peer in self._peers if not peer.failing], within)
        others = [peer for peer in self._peers if peer not in replies]
        answered = [reply for reply in replies.values() if not isinstance(reply, StoreError)]
        if len(answered) >= self.majority and decides(answered):
            others = [peer for peer in others if peer.due()]
            left = min(within, max((peer.grace for peer in others), default=0.0))
        else:
            left = max(until - self._clock(), LEAST)
        replies.update(run(others, left))
        for peer, reply in replies.items():
            peer.note(reply)
        return [replies[p] if p in replies else p.left_alone() for p in self._peers]
