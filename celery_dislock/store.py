"""The leases on a lock server: what the scripts are told, and what their answers mean."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from celery_dislock.connections import server_for
from celery_dislock.exceptions import StoreError
from celery_dislock.scripts import ACQUIRE, HOLDERS, RELEASE, RELEASE_DEAD, RENEW

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


MODES = {"exclusive": "x", "shared": "s"}  # as the scripts write them
NAMES = {letter: mode for mode, letter in MODES.items()}


class Granted(NamedTuple):
    """The lock was taken, or its owner had it already."""

    token: int


class Refused(NamedTuple):
    """The lock does not admit another lease; of those in the way, the one that ends first."""

    owner: str
    remaining: float  # seconds
    holder: Mapping[str, Any]


class Holding(NamedTuple):
    """A live lease."""

    owner: str
    remaining: float  # seconds
    token: int
    mode: str
    holder: Mapping[str, Any]


def milliseconds(seconds: float) -> int:
    """Convert a duration, rounded up: a lease never ends before its time."""
    return -int(-seconds * 1000 // 1)


class Store:
    """The leases on one lock server.

    Every method blocks for a round trip, no longer than the socket timeouts allow; all are safe to
    call from many threads or greenlets.

    Args:
        url: See :func:`celery_dislock.connections.server_for`, as for the others.
        options: Keyword arguments of redis-py's Connection, on top of the URL's.
        pause: Called with seconds to wait between two attempts.

    Raises:
        SettingsError: The URL or an option is not redis-py's.

    Attributes:
        server: The server's URL as a message may show it.
    """

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any] | None = None,
        *,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._server = server_for(url, options, pause=pause)
        self.server = self._server.name

    def acquire(
        self,
        lock: str,
        owner: str,
        ttl: float,
        holder: str,
        *,
        mode: str = "exclusive",
        limit: int = 1,
        place: float = 0.0,
        fair: bool = True,
    ) -> Granted | Refused:
        """
        Take the lock, or confirm and renew the lease that its owner already has.

        Args:
            lock: Name of the lock in Redis.
            owner: Who asks; no two acquisitions share it.
            ttl: Expiry of the lease in seconds, > 0, rounded up to a millisecond.
            holder: JSON object that others are shown while the lock is held.
            mode: "exclusive" or "shared".
            limit: Leases at a time of an exclusive lock, > 0.
            place: Seconds for which an owner that is refused stands in line; it is to ask again
                before they are over.  0: it does not wait.
            fair: Come after those who wait already.

        Returns:
            The fencing token, or the lease that is in the way.

        Raises:
            StoreError: The server did not answer; the lock may have been taken, see there.
        """
        reply = self._server.run(
            ACQUIRE,
            lock,
            owner,
            milliseconds(ttl),
            holder,
            MODES[mode],
            limit,
            milliseconds(place),
            int(fair),
        )
        if reply[0] == 1:
            return Granted(int(reply[1]))
        _, remaining_ms, other, other_holder = reply
        return Refused(
            other.decode().removeprefix("~"), remaining_ms / 1000, json.loads(other_holder)
        )

    def wait(self, lock: str, owner: str, seconds: float) -> bool:
        """
        Wait to be handed the lock; blocks for *seconds* at most.

        Returns:
            Whether it was handed over; either way, ask again.

        Raises:
            StoreError: The server went away; ask again.
        """
        return self._server.pop(f"{lock}:wake:{owner}", seconds)

    def holders(self, lock: str) -> list[Holding]:
        """
        Ask who holds the lock.

        Raises:
            StoreError: The server did not answer.
        """
        reply = self._server.run(HOLDERS, lock)
        return [
            Holding(
                owner.decode().removeprefix("~"),
                remaining / 1000,
                int(token),
                NAMES[mode.decode()],
                json.loads(holder),
            )
            for owner, remaining, token, mode, holder in zip(*[iter(reply)] * 5, strict=True)
        ]

    def extend(self, lock: str, owner: str, ttl: float) -> bool:
        """
        Reset the expiry of one lease.

        Returns:
            False where the owner does not hold the lock: nothing was created or revived.

        Raises:
            StoreError: The server did not answer; the lease may have been renewed or not.
        """
        return bool(self._server.run(RENEW, lock, owner, milliseconds(ttl)) == 1)

    def release(self, lock: str, owner: str, at_least: float = 0.0) -> bool:
        """
        End the owner's lease, or its wait for one, and hand the lock on to those who wait.

        Args:
            lock: Name of the lock in Redis.
            owner: Whose lease.
            at_least: Seconds since its acquisition until which the lease is to run out instead.

        Returns:
            True where the owner still held it; False where it was gone, which is also the answer
            to a release that is sent again.

        Raises:
            StoreError: The server did not answer; the lease ends with its expiry at the latest.
        """
        return bool(self._server.run(RELEASE, lock, owner, milliseconds(at_least)))

    def release_dead(self, lock: str, owner_start: str, at_least: float = 0.0) -> int:
        """
        End the leases of owners that begin with *owner_start*; their process is known to be gone.

        Returns:
            How many there were.

        Raises:
            StoreError: The server did not answer; the leases end with their expiry at the latest.
        """
        return int(self._server.run(RELEASE_DEAD, lock, owner_start, milliseconds(at_least)))

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
        calls = [(lock, owner, milliseconds(ttl)) for lock, owner, ttl in leases]
        replies = self._server.run_many(RENEW, calls, within=within)
        return [r if isinstance(r, StoreError) else r == 1 for r in replies]

    def ping(self) -> dict[str, Any]:
        """
        Ask the server who it is.

        Returns:
            The fields of ``INFO``'s server, memory and replication sections, as text.

        Raises:
            StoreError: It did not answer, or refused.
        """
        info = self._server.send(b"INFO").decode()
        return dict(line.split(":", 1) for line in info.splitlines() if ":" in line)

    def close(self) -> None:
        """Close the connections that are not in use."""
        self._server.close()
