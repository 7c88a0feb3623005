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

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import redis
from redis.exceptions import NoScriptError, RedisError

from celery_dislock.clock import monotonic
from celery_dislock.config.urls import without_password
from celery_dislock.exceptions import DamagedLockError, StoreError
from celery_dislock.redaction import reason_of
from celery_dislock.servers.connecting import connection_maker
from celery_dislock.servers.connections import (
    BLOCKING,
    Silence,
    Wire,
    by_digest,
    by_text,
    locks_of,
    store_error,
)
from celery_dislock.servers.pipeline import LEAST, Batch, ask_all, ask_each
from celery_dislock.servers.server import Member

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from celery_dislock.scripts import Script
    from celery_dislock.servers.connections import Command, Driver
    from celery_dislock.servers.pipeline import Call

    # Returns whether these replies of a majority decide, whatever the other servers say.
    Decides = Callable[[Sequence[Any]], bool]

RETRY_AFTER = 0.5  # seconds until a server that failed is asked again; doubled each time
GRACE = 0.05  # seconds that it then gets, after the others have answered; doubled each time
DOUBLED = 4  # most times that both are doubled

logger = logging.getLogger("celery_dislock")


def by_majority(answered: Sequence[Any]) -> bool:  # noqa: ARG001 -- what they say is no matter
    """Return True: that a majority has answered decides."""
    return True


class NoReplyError(StoreError):
    """A command was sent and got no reply; the server may still run it at any later time."""


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
        new_batch: Makes what sends pipelines to this server.
        batch: The one that the watchdog uses.
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
        self._wire = Wire(lambda _within: make())
        self.new_batch = partial(Batch, self.name, lambda _within: make())
        self.batch = self.new_batch()
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
        return StoreError(self.name, self._error.reason)

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

    def start(self, first: Command, again: Command, within: float) -> redis.Connection:
        """
        Send a command; see :meth:`celery_dislock.servers.connections.Wire.start`.

        Args:
            first: The command.
            again: What is sent if the connection has broken.
            within: Seconds to connect.

        Raises:
            StoreError: The command could not be sent.
        """
        try:
            try:
                return self._wire.start(first, within=within)
            except redis.ConnectionError:  # perhaps an idle connection that has ended
                self._wire.close_idle()
                return self._wire.start(again, within=within)
        except (RedisError, OSError) as exc:
            raise store_error(self.name, exc) from None

    def finish(
        self,
        connection: redis.Connection,
        again: Command,
        undo: Callable[[], Command] | None,
        within: float,
    ) -> Any:
        """
        Read the reply.  Blocks for at most *within* seconds, twice that with a new connection.

        Args:
            connection: What :meth:`start` has returned.
            again: Sent, once, if the server does not know the script, or the connection broke.
            undo: See :meth:`celery_dislock.servers.connections.Wire.finish`.
            within: Seconds until the reply begins to arrive.

        Raises:
            StoreError: The reply is an error.
            NoReplyError: No reply arrived.
        """
        until = self._clock() + within
        try:
            try:
                return self._wire.finish(connection, within=within, undo=undo)
            except NoScriptError:
                pass
            except redis.ConnectionError:
                self._wire.close_idle()
            left = max(until - self._clock(), LEAST)
            connection = self._wire.start(again, within=left)
            return self._wire.finish(connection, within=left, undo=undo)
        except redis.ResponseError as exc:
            raise store_error(self.name, exc, locks_of(again)) from None
        except Silence:
            raise NoReplyError(self.name, "no reply in time") from None
        except (RedisError, OSError) as exc:
            raise NoReplyError(self.name, reason_of(exc)) from None

    def ask(self, *command: str | bytes | int, within: float) -> Any:
        """
        Send a command to this server alone; see :meth:`start` and :meth:`finish`.

        Raises:
            StoreError: The server did not answer, or the reply is an error.
        """
        return self.finish(self.start(command, command, within), command, None, within)

    def close(self) -> None:
        """Close the connections, those in use after their use."""
        self._wire.close()
        self.batch.close()


class Peers:
    """
    All servers.  Safe to use from many threads or greenlets, except :meth:`ask_many`.

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
        script: Script,
        keys: Sequence[str],
        *arguments: str | bytes | int,
        within: float,
        undo: Callable[[], Command] | None = None,
        decides: Decides = by_majority,
    ) -> list[Any]:
        """
        Run a script on all servers.

        Args:
            script: The script.
            keys: The locks.
            arguments: Arguments of the script.
            within: Seconds for all replies together.
            undo: Returns a command to send to a server that does not answer in time.  It undoes
                the script there, whenever the server runs both.
            decides: If the answers of a majority do not, no server is left alone.

        Returns:
            The reply of each server or a StoreError, in the order of the servers.
        """
        first, again = by_digest(script, keys, *arguments), by_text(script, keys, *arguments)
        return self._ask(partial(self._run, first, again, undo), within, decides)

    def send(self, *command: str | bytes | int, within: float) -> list[Any]:
        """Send a command to all servers; returns the same as :meth:`ask`."""
        return self._ask(partial(self._run, command, command, None), within)

    def members(self, within: float) -> list[Member]:
        """Return the servers; see :meth:`celery_dislock.servers.server.Server.members`."""
        return [
            Member(peer.name, partial(peer.ask, within=within), peer.new_batch)
            for peer in self._peers
        ]

    def ask_many(
        self, script: Script, calls: Sequence[Call], *, within: float, decides: Decides
    ) -> list[Any]:
        """
        Run a script many times on all servers, in one pipelined round trip to each.

        For one thread only.  *decides* is asked about lists of replies.

        Returns:
            The list of replies of each server or a StoreError, in the order of the servers.
        """

        def run(peers: Sequence[Peer], within: float) -> dict[Peer, Any]:
            return ask_all(script, {peer: (peer.batch, calls) for peer in peers}, within=within)

        return self._ask(run, within, decides)

    def close(self) -> None:
        """Close the connections that are not in use."""
        for peer in self._peers:
            peer.close()

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

    def _run(
        self,
        first: Command,
        again: Command,
        undo: Callable[[], Command] | None,
        peers: Sequence[Peer],
        within: float,
    ) -> dict[Peer, Any]:
        return ask_each(
            peers,
            lambda peer, left: peer.start(first, again, left),
            lambda peer, connection, left: peer.finish(connection, again, undo, left),
            within=within,
            clock=self._clock,
        )
