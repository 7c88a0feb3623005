"""Several independent servers that are asked the same at once.

All are sent to before the first reply is read, so that asking five takes little longer than asking
one.  A server that fails is away for a while: it is asked after the others have answered, seldom,
and given little time then.  The longer it is away, the more seldom, and the more time it is given,
so that a server that is only slow comes back, and one that is dead costs about as much of one
caller's time whatever becomes of it.  Only where the others are too few are all of them asked.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import redis
from redis.exceptions import NoScriptError, RedisError

from celery_dislock.config.urls import without_password
from celery_dislock.exceptions import DamagedLockError, StoreError
from celery_dislock.redaction import reason_of
from celery_dislock.servers.connections import (
    Silence,
    Wire,
    connection_maker,
    locks_of,
    store_error,
)
from celery_dislock.servers.pipeline import LEAST, Batch, ask_all

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from celery_dislock.scripts import Script
    from celery_dislock.servers.connections import Command
    from celery_dislock.servers.pipeline import Call

RETRY_AFTER = 0.5  # seconds until a server that failed is asked again; doubled each time
GRACE = 0.05  # seconds for its answer then, once the others have answered; doubled each time
DOUBLED = 4  # times, at most

logger = logging.getLogger("celery_dislock")


class NoReplyError(StoreError):
    """It was sent, and no reply came: the server may still carry it out, at any later time."""


class Asked(NamedTuple):
    """A command on its way."""

    connection: redis.Connection
    again: (
        Command  # what is sent where the server does not know the script, or the connection broke
    )
    undo: Command | None  # what is sent after it where no reply comes


class Peer:
    """
    One of the servers.

    Args:
        url: See :func:`celery_dislock.servers.connections.connection_maker`.
        options: Of its connections.
        clock: Monotonic seconds.

    Attributes:
        name: The URL as a message may show it.
        batch: Its pipelines.
    """

    def __init__(
        self, url: str, options: Mapping[str, Any], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = without_password(url)
        make = connection_maker(self.name, url, options)
        self._wire = Wire(lambda _within: make())
        self.batch = Batch(self.name, lambda _within: make())
        self._clock = clock
        self._failures = 0
        self._retry_at = 0.0
        self._error = StoreError(self.name, "it has not been asked")

    @property
    def failing(self) -> bool:
        """Whether it has failed, and not answered since."""
        return self._failures > 0

    @property
    def grace(self) -> float:
        """Seconds that it is given while the others do without it."""
        return float(GRACE * 2**self._failures)

    def due(self) -> bool:
        """Tell whether it is time to ask it again; true for one caller at a time."""
        now = self._clock()
        if now < self._retry_at:
            return False
        self._failures = min(self._failures + 1, DOUBLED)
        self._retry_at = now + RETRY_AFTER * 2**self._failures
        return True

    def left_alone(self) -> StoreError:
        """Return the error that stands for an answer where it was not asked."""
        return StoreError(self.name, self._error.reason)

    def note(self, reply: Any) -> None:
        """Remember whether it answered."""
        if isinstance(reply, StoreError) and not isinstance(reply, DamagedLockError):
            self._error = reply
            if not self._failures:
                self._failures = 1
                self._retry_at = self._clock() + RETRY_AFTER
                logger.warning(
                    "Lock server %s fails, the others go on without it: %s", self.name, reply.reason
                )
        elif self._failures:
            self._failures = 0
            logger.info("Lock server %s answers again.", self.name)

    def start(self, first: Command, again: Command, undo: Command | None, within: float) -> Asked:
        """
        Send a command; see :meth:`celery_dislock.servers.connections.Wire.start`.

        Raises:
            StoreError: It could not be sent.
        """
        try:
            try:
                return Asked(self._wire.start(first, within=within), again, undo)
            except redis.ConnectionError:  # an idle connection, perhaps, that ended meanwhile
                self._wire.close_idle()
                return Asked(self._wire.start(again, within=within), again, undo)
        except (RedisError, OSError) as exc:
            raise store_error(self.name, exc) from None

    def finish(self, asked: Asked, within: float) -> Any:
        """
        Read the reply; blocks for *within* seconds at most.

        A connection that broke is replaced once, since that is known at once.

        Raises:
            StoreError: It is an error.
            NoReplyError: There was none.
        """
        until = self._clock() + within
        try:
            try:
                return self._wire.finish(asked.connection, within=within, undo=asked.undo)
            except NoScriptError:
                pass
            except redis.ConnectionError:
                self._wire.close_idle()
            left = max(until - self._clock(), LEAST)
            connection = self._wire.start(asked.again, within=left)
            return self._wire.finish(connection, within=left, undo=asked.undo)
        except redis.ResponseError as exc:
            raise store_error(self.name, exc, locks_of(asked.again)) from None
        except Silence:
            raise NoReplyError(self.name, "no reply in time") from None
        except (RedisError, OSError) as exc:
            raise NoReplyError(self.name, reason_of(exc)) from None

    def ask(self, *command: str | bytes | int, within: float) -> Any:
        """
        Send a command by itself; blocks for twice *within* seconds at most.

        Raises:
            StoreError: It did not answer.
        """
        return self.finish(self.start(command, command, None, within), within)

    def close(self) -> None:
        """Close the connections that are not in use."""
        self._wire.close_idle()
        self.batch.close()


class Peers:
    """
    The servers.  Safe to use from many threads or greenlets, but for :meth:`ask_many`.

    Args:
        peers: One or more, in the order in which everybody asks them.
        clock: Monotonic seconds.

    Attributes:
        majority: More than half of them, as few as possible.
    """

    def __init__(self, peers: Sequence[Peer], clock: Callable[[], float] = time.monotonic) -> None:
        self._peers = peers
        self._clock = clock
        self.majority = len(peers) // 2 + 1

    def ask(
        self,
        script: Script,
        keys: Sequence[str],
        *arguments: str | bytes | int,
        within: float,
        undo: Command | None = None,
    ) -> list[Any]:
        """
        Run a script on all servers.

        Args:
            script: The script.
            keys: The locks.
            arguments: Of the script.
            within: Seconds for all answers together.
            undo: What a server is sent that does not answer in time, so that it comes to nothing
                there whenever it is carried out.

        Returns:
            In the order of the servers, the reply of each or a StoreError.
        """
        first, again = script.by_digest(keys, *arguments), script.by_text(keys, *arguments)
        return self._ask(partial(self._run, first, again, undo), within)

    def send(self, *command: str | bytes | int, within: float) -> list[Any]:
        """Send a command to all servers; as for :meth:`ask`."""
        return self._ask(partial(self._run, command, command, None), within)

    def senders(self, within: float) -> list[Callable[..., Any]]:
        """Return what sends a command to each server."""
        return [partial(peer.ask, within=within) for peer in self._peers]

    def ask_many(self, script: Script, calls: Sequence[Call], *, within: float) -> list[Any]:
        """
        Run a script many times on all servers, in one pipelined round trip to each.

        For one thread only.

        Returns:
            In the order of the servers, a list of replies of each, or a StoreError.
        """

        def run(peers: Sequence[Peer], within: float) -> dict[Peer, Any]:
            batches = {peer: (peer.batch, calls) for peer in peers}
            replies, failed = ask_all(script, batches, within=within)
            return {peer: replies[peer][0] if peer in failed else replies[peer] for peer in peers}

        return self._ask(run, within)

    def close(self) -> None:
        """Close the connections that are not in use."""
        for peer in self._peers:
            peer.close()

    def _ask(
        self, run: Callable[[Sequence[Peer], float], dict[Peer, Any]], within: float
    ) -> list[Any]:
        until = self._clock() + within
        replies = run([peer for peer in self._peers if not peer.failing], within)
        others = [peer for peer in self._peers if peer not in replies]
        answered = sum(not isinstance(reply, StoreError) for reply in replies.values())
        if answered >= self.majority:
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
        undo: Command | None,
        peers: Sequence[Peer],
        within: float,
    ) -> dict[Peer, Any]:
        until = self._clock() + within
        asked: dict[Peer, Asked] = {}
        replies: dict[Peer, Any] = {}
        for peer in peers:
            try:
                # Half of what is left: to connect to one that is silent leaves time for the others.
                left = max((until - self._clock()) / 2, LEAST)
                asked[peer] = peer.start(first, again, undo, left)
            except StoreError as exc:
                replies[peer] = exc
        for peer, on_its_way in asked.items():
            try:
                replies[peer] = peer.finish(on_its_way, max(until - self._clock(), 0.0))
            except StoreError as exc:
                replies[peer] = exc
        return replies
