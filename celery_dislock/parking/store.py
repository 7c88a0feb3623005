"""Parked tasks on a lock server: how they join a line, leave it, and are found.

A parked task is known by its ticket, which names one delivery of work, and is kept as the bytes of
its message; see ``_parked.lua``.  Each name of a lock that has parked tasks is noted in one hash,
outside the slots of the locks and before the first is parked, so that a line whose holder died can
be found.  There is one such hash for each broker: only who has that broker can publish the tasks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from celery_dislock.exceptions import DamagedLockError, StoreError
from celery_dislock.scripts import (
    DELIST,
    ENLIST,
    FULL,
    GIVE_BACK,
    GRANTED,
    LEAVE,
    LINES,
    PARK,
    PARKED,
    RAN_HERE,
    REFUSED,
    SWEEP,
    WITHDRAW,
)
from celery_dislock.scripts.names import index_of_lines
from celery_dislock.servers.replies import (
    MODES,
    Done,
    Full,
    Granted,
    Parked,
    Swept,
    messages,
    milliseconds,
    refused,
    text,
    turns,
)
from celery_dislock.servers.server import SOCKET_TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from celery_dislock.servers.replies import Refused, Turn
    from celery_dislock.servers.server import Server


class Ticket(NamedTuple):
    """What a task shows to be parked, or to claim its turn."""

    name: str  # of this delivery of work
    owners: str  # how the owners of all deliveries of the task begin
    marked: bool  # its message says that it was parked
    message: bytes = b""  # to be kept; empty: only ask


class Bounds(NamedTuple):
    """How many tasks may be parked in one line, and what happens to those beyond."""

    most: int = 0  # waiting for their turn; 0: any number
    most_bytes: int = 2**26  # of their messages together
    overflow: str = "skip"  # the newcomer, or "replace" the oldest


UNBOUNDED = Bounds()


class Lines:
    """
    The parked tasks of one broker on one lock server.

    Every method blocks for a round trip; all are safe to call from many threads but :meth:`sweep`.

    Args:
        server: The lock server.
        prefix: Of the locks' names.
        home: The broker, by a name without spaces.
        hand_over: See :class:`celery_dislock.servers.store.Store`.
    """

    def __init__(
        self,
        server: Server,
        prefix: str,
        home: str,
        hand_over: Callable[[Sequence[Turn]], None],
    ) -> None:
        self._server = server
        self._names = index_of_lines(prefix, home)
        self._home = home
        self._hand_over = hand_over

    def park(
        self,
        lock: str,
        owner: str,
        ttl: float,
        holder: str,
        ticket: Ticket,
        *,
        mode: str = "exclusive",
        limit: int = 1,
        bounds: Bounds = UNBOUNDED,
    ) -> Granted | Refused | Parked | Full | Done:
        """
        Take a lock for a task, or park the task in line; or only ask, where it shows no message.

        Args:
            lock: Name of the lock in Redis; :meth:`enlist` it before a task is parked.
            owner: Who asks; no two acquisitions share it.
            ttl: Expiry of the lease in seconds, > 0.
            holder: JSON object that others are shown while the lock is held.
            ticket: What is to be parked.
            mode: "exclusive" or "shared".
            limit: Leases at a time of an exclusive lock, > 0.
            bounds: Of the line.

        Returns:
            Granted: run; Refused: held, and nothing was parked; Parked; Full; or Done: this is a
            copy of work that has been done.

        Raises:
            StoreError: The server did not answer; the lock may have been taken, or the task parked.
        """
        state, given, *rest = self._server.run(
            PARK,
            [lock],
            *(owner, milliseconds(ttl), holder, MODES[mode], limit, self._home),
            *(ticket.name, ticket.owners, int(ticket.marked), ticket.message),
            *bounds,
        )
        self._publish(given)
        if state == GRANTED:
            token, claimed = rest
            return Granted((int(token),), bool(claimed))
        if state == REFUSED:
            *lease, place = rest
            return refused(*lease, place=place)
        if state == PARKED:
            place, *lease, replaced = rest
            return Parked(place, refused(*lease), messages(replaced))
        if state == FULL:
            waiting, *lease = rest
            return Full(waiting, refused(*lease))
        return Done()

    def leave(self, lock: str, ticket: str) -> bool:
        """
        Take a parked task out of line whose work is over, and give its turn on.

        Args:
            lock: Name of the lock in Redis.
            ticket: The task's.

        Returns:
            Whether it was there.

        Raises:
            StoreError: The server did not answer; it may have left.
        """
        left, given = self._server.run(LEAVE, [lock], self._home, ticket, b"", 1)
        self._publish(given)
        return bool(left)

    def move_out(self, lock: str, ticket: str) -> bool:
        """
        Take a parked task out of the line of a lock that is not its own any more.

        Returns:
            Whether its work was done there; False: it is to run elsewhere.

        Raises:
            StoreError: The server did not answer; it may have left.
        """
        left, given = self._server.run(LEAVE, [lock], self._home, ticket, b"", 0)
        self._publish(given)
        return bool(left == RAN_HERE)

    def withdraw(self, lock: str, ticket: str, delivery: str = "") -> bool:
        """
        Take a parked task out of line that cannot claim its turn, and give its turn on.

        Args:
            lock: Name of the lock in Redis.
            ticket: The task's.
            delivery: Names the delivery that is to run it without a lock; empty: it is set aside.

        Returns:
            True where it was in line, or had its turn, or where the delivery is to run it and
            nothing is known of it; and again to the same delivery.  False where it has claimed its
            turn, was set aside or is done, or there is none to set aside: nothing was changed.

        Raises:
            StoreError: The server did not answer; it may have left.
        """
        withdrawn, given = self._server.run(WITHDRAW, [lock], self._home, ticket, delivery)
        self._publish(given)
        return bool(withdrawn)

    def give_back(self, lock: str, ticket: str) -> None:
        """
        Put a parked task back in line whose message could not be published.

        Raises:
            StoreError: The server did not answer; its turn runs out by itself.
        """
        self._server.run(GIVE_BACK, [lock], ticket)

    def set_aside(self, lock: str, ticket: str, message: bytes) -> list[Turn]:
        """
        Take a parked task whose message nobody can read out of line, for people to see.

        Args:
            lock: Name of the lock in Redis.
            ticket: The task's.
            message: What is to be kept; empty: nothing.

        Returns:
            Whose turn it is now; the caller is to publish them.

        Raises:
            StoreError: The server did not answer; it may be set aside.
        """
        _, given = self._server.run(LEAVE, [lock], self._home, ticket, message, 0)
        return turns(given)

    def enlist(self, lock: str) -> None:
        """
        Note that a lock is about to have parked tasks.

        Raises:
            StoreError: The server did not answer.
        """
        self._server.run(ENLIST, [self._names], lock)

    def delist(self, lock: str, number: bytes) -> None:
        """
        Strike off a lock without parked tasks, unless it was enlisted again meanwhile.

        Args:
            lock: Name of the lock in Redis.
            number: What :meth:`page` gave before the line was found empty.

        Raises:
            StoreError: The server did not answer.
        """
        self._server.run(DELIST, [self._names], lock, number)

    def any(self) -> bool:
        """
        Tell whether any lock has, or has just had, parked tasks.

        Raises:
            StoreError: The server did not answer.
        """
        total, *_ = self._server.run(LINES, [self._names], b"0", 1)
        return bool(total)

    def page(self, cursor: bytes, count: int) -> tuple[int, bytes, Mapping[str, bytes]]:
        """
        Read some names of locks that have parked tasks.

        Args:
            cursor: b"0" to begin with, then what the last page gave.
            count: Of locks, more or less.

        Returns:
            How many there are in all, the next cursor, b"0" where this was the last page, and a
            number for each lock's name, for :meth:`delist`.

        Raises:
            StoreError: The server did not answer.
        """
        total, cursor, found = self._server.run(LINES, [self._names], cursor, count)
        names = {text(lock): seen for lock, seen in zip(*[iter(found)] * 2, strict=True)}
        return total, cursor, names

    def sweep(self, locks: Sequence[str]) -> Mapping[str, Swept | DamagedLockError]:
        """
        Hand on locks that nobody has released, in one pipelined round trip.

        For one thread only, on a connection of its own.

        Args:
            locks: Names of the locks in Redis.

        Returns:
            What was found, by lock, or that the lock is damaged; those that could not be looked at
            for another reason are missing.

        Raises:
            StoreError: The server did not answer.
        """
        if not locks:
            return {}
        calls: list[tuple[Any, ...]] = [(lock, self._home) for lock in locks]
        replies = self._server.run_many(SWEEP, calls, within=SOCKET_TIMEOUT)
        found: dict[str, Swept | DamagedLockError] = {}
        for lock, reply in zip(locks, replies, strict=True):
            if isinstance(reply, DamagedLockError):
                found[lock] = reply
            if isinstance(reply, StoreError):
                continue
            parked, given, replaced, unclaimed = reply
            self._publish(given)
            told = tuple(ticket.decode() for ticket in unclaimed)
            found[lock] = Swept(parked, messages(replaced), told)
        return found

    def _publish(self, given: Sequence[bytes]) -> None:
        if given:
            self._hand_over(turns(given))
