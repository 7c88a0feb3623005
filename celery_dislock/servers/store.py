"""The leases on a lock server: what the scripts are told, and what their answers mean."""

from __future__ import annotations

import contextlib
import time
from itertools import islice
from typing import TYPE_CHECKING, Any

from celery_dislock.exceptions import StoreError
from celery_dislock.scripts import (
    ACQUIRE,
    GRANTED,
    HOLDERS,
    RECALL,
    RELEASE,
    RELEASE_DEAD,
    REMEMBER,
    RENEW,
    TAKE_OVER,
)
from celery_dislock.scripts.names import mark_of, wake_list
from celery_dislock.servers.replies import (
    MODES,
    Granted,
    Handed,
    Holding,
    Refused,
    holdings,
    milliseconds,
    refused,
    renewed,
    text,
    turns,
)
from celery_dislock.servers.server import SOCKET_TIMEOUT, locks_pattern, scan, server_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from celery_dislock.scripts import Script
    from celery_dislock.servers.replies import Turn


class Store:
    """The leases on one lock server, or on several that are one by majority.

    Every method blocks for a round trip, no longer than the socket timeouts allow; all are safe to
    call from many threads or greenlets.

    What takes several locks treats them as one.  It is given their names in Redis, in the one order
    in which everybody takes them; in a cluster it needs a round trip for each slot among them.

    Args:
        url: See :func:`celery_dislock.servers.server.server_for`, as for the others.
        options: Keyword arguments of redis-py's Connection, on top of the URL's.
        pause: Called with seconds to wait between two attempts.
        home: The broker whose parked tasks the caller can publish; empty: none.
        hand_over: Called with parked tasks whose turn a release has brought; it is to publish them,
            and not to raise.

    Raises:
        SettingsError: The URL or an option is not redis-py's.

    Attributes:
        server: The server's URL as a message may show it.
        lock_server: The server itself, for what else is kept there.
        home: As above.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        options: Mapping[str, Any] | None = None,
        *,
        pause: Callable[[float], None] = time.sleep,
        home: str = "",
        hand_over: Callable[[Sequence[Turn]], None] | None = None,
    ) -> None:
        self.lock_server = server_for(url, options, pause=pause)
        self.server = self.lock_server.name
        self.home = home if self.lock_server.keeps_lines else ""
        self._hand_over = hand_over
        self._confirms = bool(options and options.get("min_replicas"))  # WAIT comes with acquire

    def acquire(
        self,
        locks: Sequence[str],
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
        Take the locks, or confirm and renew the leases that their owner already has.

        Args:
            locks: Names of the locks in Redis; all are taken, or none.
            owner: Who asks; no two acquisitions share it.
            ttl: Expiry of the lease in seconds, > 0, rounded up to a millisecond.
            holder: JSON object that others are shown while the lock is held.
            mode: "exclusive" or "shared".
            limit: Leases at a time of an exclusive lock, > 0.
            place: Seconds for which an owner that is refused stands in line at the lock that
                refused it, and keeps those before it; it is to ask again before they are over.
                0: it does not wait.
            fair: Come after those who wait already.

        Returns:
            The fencing tokens, or the lease that is in the way.

        Raises:
            StoreError: The server did not answer; the locks may have been taken, see there.
        """
        terms = (
            milliseconds(ttl),
            holder,
            MODES[mode],
            limit,
            milliseconds(place),
            int(fair),
        )
        tokens: list[int] = []
        try:
            for together in self.lock_server.together(locks):
                state, *answer = self.lock_server.run(ACQUIRE, together, owner, *terms)
                if state != GRANTED:
                    if not place:
                        self._give_back(locks[: len(tokens)], owner)
                    remaining_ms, other, other_holder, nth = answer
                    return refused(remaining_ms, other, other_holder, nth=len(tokens) + nth)
                tokens += map(int, answer)
        except StoreError:
            self._give_back(locks[: len(tokens)], owner)
            raise
        return Granted(tuple(tokens))

    def _give_back(self, locks: Sequence[str], owner: str) -> None:
        if locks:
            with contextlib.suppress(StoreError):  # they end with their expiry
                self.release(locks, owner)

    def wait(self, lock: str, owner: str, seconds: float) -> Handed | None:
        """
        Wait to be handed the lock; blocks for *seconds* at most.

        Returns:
            What was handed over; None: ask again.

        Raises:
            StoreError: The server went away; ask again.
        """
        told = self.lock_server.pop(wake_list(lock, owner), seconds)
        if not told or self._confirms:
            return None
        token, ttl_ms, place_left_ms = map(int, told.split())
        return Handed(token, ttl_ms / 1000, place_left_ms / 1000)

    def holders(self, lock: str) -> list[Holding]:
        """
        Ask who holds the lock.

        Raises:
            StoreError: The server did not answer.
        """
        return holdings(self.lock_server.run(HOLDERS, [lock]))

    def all_holders(self, prefix: str) -> Iterator[dict[str, list[Holding]]]:
        """
        Ask who holds which lock, of all there are.

        Reads every name on the server, so it is for a worker's start and for tools.  What is taken
        or released meanwhile may be among them or not, and a lock may come twice.  For one thread
        only, as :meth:`renew` is.

        Args:
            prefix: Of the locks' names: ``dislock_prefix``.

        Returns:
            The leases of locks that are held, by the lock's name in Redis, some hundred at a time,
            so that a caller can stop.

        Raises:
            StoreError: A server did not answer; those on the others have come before.
        """
        error = None
        for send in self.lock_server.senders():
            try:
                for names in scan(send, locks_pattern(prefix)):
                    yield self._holders_of(names)
            except StoreError as exc:
                error = exc
        if error is not None:
            raise error

    def _holders_of(self, locks: Sequence[str]) -> dict[str, list[Holding]]:
        if not locks:
            return {}
        calls = [(lock,) for lock in locks]
        replies = self.lock_server.run_many(HOLDERS, calls, within=SOCKET_TIMEOUT)
        return {
            lock: holdings(reply)
            for lock, reply in zip(locks, replies, strict=True)
            if not isinstance(reply, StoreError)  # something else has such a name
        }

    def extend(self, locks: Sequence[str], owner: str, ttl: float) -> bool:
        """
        Reset the expiry of the owner's leases.

        Returns:
            False where the owner does not hold all of the locks: nothing was created or revived.

        Raises:
            StoreError: The server did not answer; the leases may have been renewed or not.
        """
        return all(self.lock_server.run(RENEW, [lock], owner, milliseconds(ttl)) for lock in locks)

    def release(
        self,
        locks: Sequence[str],
        owner: str,
        at_least: float = 0.0,
        ticket: str = "",
        settles: float = 0.0,
    ) -> bool:
        """
        End the owner's leases, or its wait for them, and hand the locks on to those who wait.

        Args:
            locks: Names of the locks in Redis.
            owner: Whose leases.
            at_least: Seconds since their acquisition until which they are to run out instead.
            ticket: Of a task that may have been parked, and has ended.
            settles: Seconds for its result and what follows, which are on their way; then a copy
                may run.  0: it is done, and no copy is to run.

        Returns:
            True where the owner held all of them until now.  That is assumed where a reply was
            lost on the way: the command was sent again, and may have found its own work.  False
            where one was gone before.

        Raises:
            StoreError: The server did not answer; the leases end with their expiry at the latest.
        """
        return self._end(RELEASE, locks, owner, at_least, ticket, settles) == len(locks)

    def release_dead(
        self, locks: Sequence[str], owner_start: str, at_least: float | None = 0.0
    ) -> int:
        """
        End what owners hold or wait for that begin with *owner_start*; their process is gone.

        Args:
            locks: Names of the locks in Redis.
            owner_start: All of the owners' names but the counter of their acquisition.
            at_least: Seconds since their acquisition until which leases are to run out instead;
                None: they are left to expire, and only the places in line are given up.

        Returns:
            How many leases were ended.

        Raises:
            StoreError: The server did not answer; the leases end with their expiry at the latest.
        """
        return self._end(RELEASE_DEAD, locks, owner_start, at_least)

    def _end(
        self,
        script: Script,
        locks: Sequence[str],
        owner: str,
        at_least: float | None,
        ticket: str = "",
        settles: float = 0.0,
    ) -> int:
        at_least_ms = -1 if at_least is None else milliseconds(at_least)
        publisher = (self.home, ticket, milliseconds(settles)) if self.home else ()
        ended, error = 0, None
        given: list[Turn] = []
        for together in self.lock_server.together(locks):
            try:
                reply, resent = self.lock_server.exchange(
                    script, together, owner, at_least_ms, *publisher
                )
            except StoreError as exc:  # of one node; the others are not to wait for it
                error = exc
                continue
            if isinstance(reply, list):
                reply, told = reply
                given += turns(told)
            ended += len(together) if resent and script is RELEASE else reply
        if given and self._hand_over is not None:
            self._hand_over(given)
        if error is not None:
            raise error
        return ended

    def renew(
        self, leases: Sequence[tuple[Sequence[str], str, float]], *, within: float
    ) -> list[bool | StoreError]:
        """
        Reset the expiry of many leases in one pipelined round trip, on a connection of its own.

        Called by one thread only, the watchdog's, which has its own idea of when to try again:
        nothing is resent here.

        Args:
            leases: Names of the locks in Redis, owner, and expiry in seconds from now, each.
            within: Seconds for the connection, where there is none yet, and for the first reply.

        Returns:
            For each lease in turn: True renewed, False no longer held, one of its locks at least,
            or the error that the server answered for this one.

        Raises:
            StoreError: The server did not answer; each lease may have been renewed or not.
        """
        calls = [(lock, owner, milliseconds(ttl)) for locks, owner, ttl in leases for lock in locks]
        replies = iter(self.lock_server.run_many(RENEW, calls, within=within))
        return [renewed(list(islice(replies, len(locks)))) for locks, _, _ in leases]

    def clear(self, owners: Sequence[tuple[Sequence[str], str]], *, within: float) -> None:
        """
        End what many owners hold or wait for that are over, in one pipelined round trip.

        For one thread only, as :meth:`renew`, on the same connection.  Parked tasks have their turn
        when the next sweep comes by.

        Args:
            owners: Names of the locks in Redis and the owner, each.
            within: Seconds for the connection, where there is none yet, and for the first reply.

        Raises:
            StoreError: The server did not answer; any of them may have been ended.
        """
        calls = [(lock, owner, 0) for locks, owner in owners for lock in locks]
        self.lock_server.run_many(RELEASE, calls, within=within)

    def ping(self) -> dict[str, Any]:
        """
        Ask the server who it is.

        Returns:
            The fields of ``INFO``'s server, memory and replication sections, as text.

        Raises:
            StoreError: It did not answer, or refused.
        """
        info = self.lock_server.send(b"INFO").decode()
        return dict(line.split(":", 1) for line in info.splitlines() if ":" in line)

    def take_over(self, locks: Sequence[str], left_by: str, owner: str, holder: str) -> int:
        """
        Go on with leases that another owner has left to run out; nobody gets in between.

        Args:
            locks: Names of the locks in Redis.
            left_by: The owner that has left them, by a release with *at_least*.
            owner: Who goes on.  The expiry stays as it is until it acquires or renews.
            holder: JSON object that others are shown from now on.

        Returns:
            How many were taken over: none where they have ended, or another was quicker.

        Raises:
            StoreError: The server did not answer; they may have been taken over.
        """
        return sum(
            self.lock_server.run(TAKE_OVER, together, left_by, owner, holder)
            for together in self.lock_server.together(locks)
        )

    def remember(self, lock: str, task_id: str, mark: str, seconds: float) -> None:
        """
        Leave a mark about a task beside the lock, for so many seconds.

        Raises:
            StoreError: The server did not answer; the mark may be there or not.
        """
        self.lock_server.run(REMEMBER, [mark_of(lock, task_id)], mark, milliseconds(seconds))

    def recall(self, lock: str, task_id: str) -> str | None:
        """
        Return the mark that was left about a task; None where there is none.

        Raises:
            StoreError: The server did not answer.
        """
        mark: bytes | None = self.lock_server.run(RECALL, [mark_of(lock, task_id)])
        return None if mark is None else text(mark)

    def close(self) -> None:
        """Close the connections that are not in use."""
        self.lock_server.close()
