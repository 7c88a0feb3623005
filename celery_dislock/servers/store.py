"""Take, renew and end the leases on a lock server, through its scripts."""

from __future__ import annotations

import contextlib
from itertools import islice
from typing import TYPE_CHECKING, Any

from celery_dislock import scripts
from celery_dislock.config.terms import ALONE, terms_text
from celery_dislock.exceptions import StoreError
from celery_dislock.scripts import milliseconds
from celery_dislock.scripts.names import mark_of, wake_list
from celery_dislock.servers.connecting import BLOCKING
from celery_dislock.servers.connections import is_answer
from celery_dislock.servers.kinds import server_for
from celery_dislock.servers.overrides import overrides_of
from celery_dislock.servers.records import decode
from celery_dislock.servers.replies import (
    FirstInLine,
    Granted,
    Handed,
    conflict_of,
    looked,
    renewed,
    turns,
)
from celery_dislock.servers.requests import RELEASED
from celery_dislock.servers.reservations import Reservations
from celery_dislock.servers.view import LEASES_ALONE, read_state

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from celery_dislock.config.terms import Terms
    from celery_dislock.scripts import Script
    from celery_dislock.servers.connecting import Driver
    from celery_dislock.servers.overrides import Override
    from celery_dislock.servers.records import Conflict
    from celery_dislock.servers.replies import StalledState, Turn
    from celery_dislock.servers.requests import Ending, Execution, LateRelease
    from celery_dislock.servers.reservations import Reservation
    from celery_dislock.servers.view import Holder


class Store:
    """The leases on one lock server, or on several servers of which a majority decides.

    A method blocks for one round trip, unless it says otherwise, within the limits of the socket
    timeouts.  All methods are safe to call from many threads or greenlets.

    A method that takes several locks treats them as one.  Their names in Redis must be in the one
    order that all callers use.  In a cluster the call needs a round trip for each slot.

    Args:
        url: See :func:`celery_dislock.servers.kinds.server_for`.
        options: See :func:`celery_dislock.servers.kinds.server_for`.
        driver: How it waits.
        broker: The broker whose parked tasks the caller can publish; empty: none.
        hand_over: Called with the parked tasks that a release has given their turn.  It must
            publish them, and must not raise.

    Raises:
        SettingsError: The URL or an option cannot be used.

    Attributes:
        server: The server's URL without its password, for messages.
        lock_server: The server itself, for code that keeps other data there.
        reservations: The reservations of keys on this server.
        broker: The argument of that name; empty if the server keeps no lines.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        options: Mapping[str, Any] | None = None,
        *,
        driver: Driver = BLOCKING,
        broker: str = "",
        hand_over: Callable[[Sequence[Turn]], None] | None = None,
    ) -> None:
        self.lock_server = server_for(url, options, driver=driver)
        self.reservations = Reservations(self.lock_server)
        self.server = self.lock_server.name
        self.broker = broker if self.lock_server.keeps_lines else ""
        self._hand_over = hand_over

    def acquire(
        self,
        locks: Sequence[str],
        owner: str,
        ttl: float,
        holder: str,
        *,
        terms: tuple[Terms, ...] = (ALONE,),
        fair: bool = True,
        place: float = 0.0,
        reservation: Reservation | None = None,
    ) -> Granted | Conflict:
        """
        Take the locks, or renew the leases if the owner already has them.

        Args:
            locks: Names of the locks in Redis.  Either all are taken or none, unless *place* is
                given.
            owner: Owner of the leases; each acquisition has its own.
            ttl: Expiry of the lease in seconds, > 0, rounded up to a millisecond.
            holder: JSON object that others are shown while the lock is held.
            terms: The terms of each lock, or one for all.
            fair: Whether to come after those who already wait.  False: they are passed if a lock
                admits one more lease.
            place: Seconds for which a refused owner keeps its place in line at the lock that
                refused it.  The owner also keeps the leases on the locks before that one.  It must
                ask again before this time is over.  0: do not wait in line.
            reservation: The reservation of the task's message, if it has the name of the one lock.
                The task begins with the acquisition; see
                :meth:`celery_dislock.servers.reservations.Reservations.begin`.

        Returns:
            The fencing tokens, or the lease that is in the way.

        Raises:
            Replaced: The task must not run, because of the reservation.
            StoreError: The server did not answer.  The locks may have been taken: their leases end
                with their expiry, or at once when the owner asks again.
        """
        script, more = (
            (scripts.ACQUIRE, ())
            if reservation is None
            else (scripts.ACQUIRE_UNIQUE, reservation.begins)
        )
        who, how = (owner, milliseconds(ttl), holder), (milliseconds(place), int(fair), *more)
        tokens: tuple[int, ...] = ()
        try:
            for group in (locks,) if len(locks) == 1 else self.lock_server.together(locks):
                before = len(tokens)
                terms_here = terms if len(terms) == 1 else terms[before : before + len(group)]
                reply, _ = self.lock_server.exchange(
                    script, group, *who, terms_text(terms_here), *how
                )
                if reply[0] != scripts.GRANTED:
                    if not place:
                        self._give_back(locks[:before], owner)
                    return conflict_of(reply, group)
                tokens += tuple(map(int, reply[1:]))
        except StoreError:
            self._give_back(locks[: len(tokens)], owner)
            raise
        return Granted(tokens)

    def _give_back(self, locks: Sequence[str], owner: str) -> None:
        if locks:
            with contextlib.suppress(StoreError):  # the leases end with their expiry
                self.release(locks, owner)

    def wait(self, lock: str, owner: str, seconds: float) -> Handed | FirstInLine | None:
        """
        Wait for a hand-off of the lock.  Blocks for at most *seconds*.

        Returns:
            The hand-off.  FirstInLine, which is falsy: another waiter was handed the lock, and this
            owner is the next.  It may wait on, but must call :meth:`acquire` when TAKE_UP is over,
            since the other waiter may be dead.  None: call :meth:`acquire` again.

        Raises:
            StoreError: The server did not answer; call :meth:`acquire` again.
        """
        told = self.lock_server.pop(wake_list(lock, owner), seconds)
        if told == b"":
            return FirstInLine()
        if told is None or self.lock_server.min_replicas:  # only acquire() sends WAIT
            return None
        token, ttl_ms, place_left_ms = map(int, told.split())
        return Handed(token, ttl_ms / 1000, place_left_ms / 1000)

    def holders(self, lock: str) -> list[Holder]:
        """
        Return the live leases of a lock.

        Raises:
            DamagedLockError: A record of the lock cannot be read.
            StoreError: The server did not answer.
        """
        return list(read_state(self.lock_server, lock, most=LEASES_ALONE).holders)

    def spent(self, locks: Sequence[str], owner: str, cost: int, terms: tuple[Terms, ...]) -> bool:
        """
        Count what a start has cost, by the terms of each lock; sent again, it changes nothing.

        Returns:
            False if the owner does not hold all of the locks.

        Raises:
            StoreError: The server did not answer; it may have been counted.
        """
        held, of_each = 0, iter(terms)
        for group in self.lock_server.together(locks):
            words = terms_text(tuple(islice(of_each, len(group))))
            held += self.lock_server.run(scripts.SPENT, group, owner, cost, words)
        return held == len(locks)

    def release(self, locks: Sequence[str], owner: str, ending: Ending = RELEASED) -> bool:
        """
        End the owner's leases or its places in line, and hand the locks to the next in line.

        Args:
            locks: Names of the locks in Redis.
            owner: Owner of the leases.
            ending: How they end.

        Returns:
            True if the owner held all of the locks until now.  Also True if a reply was lost: the
            command was sent again, and may have found its own work.  False if a lease was gone
            before.

        Raises:
            StoreError: The server did not answer; the leases end with their expiry at the latest.
        """
        script, terms = _sent(ending, self.broker)
        return self._end(script, locks, owner, *terms) == len(locks)

    def release_dead(self, locks: Sequence[str], start: str, ending: Ending = RELEASED) -> int:
        """
        End the leases and places in line of a dead process, and hand the locks on.

        Args:
            locks: Names of the locks in Redis.
            start: Start of the owners' names: all but the counter of the acquisition.
            ending: How they end; those of the locks that its *ticket* names, too.  With *expires*
                only the places in line end.

        Returns:
            Number of leases that were ended.

        Raises:
            StoreError: The server did not answer; the leases end with their expiry at the latest.
        """
        at_least_ms = -1 if ending.expires else milliseconds(ending.at_least)
        claim = ending.ticket, "" if ending.settles is None else milliseconds(ending.settles)
        return self._end(scripts.RELEASE_DEAD, locks, start, at_least_ms, self.broker, *claim)

    def _end(self, script: Script, locks: Sequence[str], owner: str, *terms: str | int) -> int:
        ended, error = 0, None
        given: list[Turn] = []
        for group in [locks] if len(locks) == 1 else self.lock_server.together(locks):
            try:
                reply, resent = self.lock_server.exchange(script, group, owner, *terms)
            except StoreError as exc:  # of one node; go on with the others
                error = exc
                continue
            if isinstance(reply, list):
                reply, told = reply
                given += turns(told)
            ended += len(group) if resent and script is not scripts.RELEASE_DEAD else reply
        if given and self._hand_over is not None:
            self._hand_over(given)
        if error is not None:
            raise error
        return ended

    def free(self, lock: str, owner: str, token: int) -> bool:
        """
        End one lease of any owner, and hand the lock to the next in line.

        Its owner is not asked, and learns of it from its next renewal.  A turn that is freed sends
        its parked task to the end of the line.

        Args:
            lock: Name of the lock in Redis.
            owner: Owner of the lease.
            token: Its fencing token.

        Returns:
            False if that lease had ended before; nothing was changed.  Also True if a reply was
            lost: the command was sent again, and may have found its own work.

        Raises:
            StoreError: The server did not answer.  The lease may have ended.
        """
        return bool(self._end(scripts.FREE, [lock], owner, token, self.broker))

    def override(
        self, lock: str, ttl: float = 0.0, note: str = "", **values: str | int | None
    ) -> dict[str, Override]:
        """
        Set something for a lock in place of what its code says, and hand the lock on.

        Args:
            lock: Name of the lock in Redis.
            ttl: Seconds for which it lasts; 0: until it is taken back.
            note: Text for people.
            values: ``limit``, a number of exclusive leases, where 0 admits no shared lease either;
                ``rate``, as :attr:`Rate.word`; or BARRED, so that nobody starts: ``pause``, which
                takes back a limit of 0, or ``back``.  None: it is taken back.

        Returns:
            All that was set until now, by name.
        """
        given = [
            part
            for name, value in values.items()
            for part in (name, "" if value is None else value)
        ]
        call = (self.broker, milliseconds(ttl), note, *given)
        before, turned = self.lock_server.run(scripts.OVERRIDE, [lock], *call)
        if turned and self._hand_over is not None:
            self._hand_over(turns(turned))
        return overrides_of(before)

    def renew(
        self, leases: Sequence[tuple[Sequence[str], str, float]], *, within: float | None = None
    ) -> list[bool | str | StoreError]:
        """
        Reset the expiry of leases.  No lease is created or revived.

        Args:
            leases: For each lease the names of the locks in Redis, the owner, and the expiry in
                seconds from now.
            within: Seconds to connect if no connection is idle, and for each reply; then all is
                sent in one pipelined round trip, and nothing again.  None: one by one, and again
                if a reply is lost; an error is raised.

        Returns:
            For each lease, in the same order: True, or the id of a newer task that waits for it, if
            it was renewed; False if a lock is no longer held; or the server's error.

        Raises:
            StoreError: The server did not answer; each lease may have been renewed or not.
        """
        calls = [(lock, owner, milliseconds(ttl)) for locks, owner, ttl in leases for lock in locks]
        replies = iter(
            [self.lock_server.run(scripts.RENEW, [lock], who, ms) for lock, who, ms in calls]
            if within is None
            else self.lock_server.run_many(scripts.RENEW, calls, within=within)
        )
        return [renewed(list(islice(replies, len(locks)))) for locks, _, _ in leases]

    def renew_stalled(
        self, executions: Sequence[Execution], *, within: float
    ) -> list[StalledState | StoreError]:
        """
        Renew the leases of executions that are overdue, in one pipelined round trip.

        Args:
            executions: The executions whose processes are alive.
            within: Seconds to connect if no connection is idle, and for each reply.

        Returns:
            For each execution, in the same order: what was found and done, or the error that the
            server returned.

        Raises:
            StoreError: The server did not answer; each lease may have been renewed or not.
        """
        calls = [
            (
                *(lock, execution.owner_start, milliseconds(execution.ttl)),
                *(milliseconds(execution.overdue), milliseconds(execution.longest)),
            )
            for execution in executions
            for lock in execution.locks
        ]
        replies = iter(self.lock_server.run_many(scripts.RENEW_STALLED, calls, within=within))
        return [looked(list(islice(replies, len(execution.locks)))) for execution in executions]

    def clear(self, releases: Sequence[LateRelease], *, within: float) -> list[StoreError | None]:
        """
        End the leases and places in line of many owners, in a pipelined round trip or two.

        Parked tasks get their turn at the next sweep.

        Args:
            releases: What is ended, and how.
            within: Seconds to connect if no connection is idle, and for each reply.

        Returns:
            For each of them, in the same order: None if it was ended, or the error that the server
            returned.

        Raises:
            StoreError: The server did not answer; each lease and place may have been ended or not.
        """
        errors: list[StoreError | None] = [None] * len(releases)
        sent: dict[Script, list[tuple[int, tuple[str | int, ...]]]] = {}
        for number, (locks, owner, ending) in enumerate(releases):
            script, terms = _sent(ending, broker="")  # of no broker: the caller cannot publish
            sent.setdefault(script, []).extend((number, (lock, owner, *terms)) for lock in locks)
        for script, numbered in sent.items():
            calls = [call for _, call in numbered]
            replies = self.lock_server.run_many(script, calls, within=within)
            for (number, _), reply in zip(numbered, replies, strict=True):
                errors[number] = reply if isinstance(reply, StoreError) else errors[number]
        return errors

    def ping(self) -> dict[str, Any]:
        """
        Ask the server for information about itself.

        Returns:
            The fields of ``INFO``, as text; empty if the server refuses that command.

        Raises:
            StoreError: The server did not answer.
        """
        try:
            info = self.lock_server.send(b"INFO").decode()
        except StoreError as exc:
            if not is_answer(exc):
                raise
            return {}
        return dict(line.split(":", 1) for line in info.splitlines() if ":" in line)

    def take_over(self, locks: Sequence[str], left_by: str, owner: str, holder: str) -> int:
        """
        Take over leases that another owner has left to run out; they are never free in between.

        Args:
            locks: Names of the locks in Redis.
            left_by: The owner that has left the leases, by an ending with *at_least*.
            owner: The new owner.  The expiry stays the same until the new owner acquires or renews.
            holder: JSON object that others are shown from now on.

        Returns:
            How many were taken over: 0 if they have ended, or another owner was first; all of a
            node whose reply was lost, as the command was sent again, and may find its own work.

        Raises:
            StoreError: The server did not answer; the leases may have been taken over.
        """
        server, taken = self.lock_server, 0
        for group in server.together(locks):
            reply, resent = server.exchange(scripts.TAKE_OVER, group, left_by, owner, holder)
            taken += len(group) if resent else reply
        return taken

    def remember(self, lock: str, task_id: str, mark: str, seconds: float) -> None:
        """
        Store a mark about a task beside the lock, for *seconds*.

        Raises:
            StoreError: The server did not answer; the mark may be there or not.
        """
        self.lock_server.run(scripts.MARK, [mark_of(lock, task_id)], mark, milliseconds(seconds))

    def recall(self, lock: str, task_id: str) -> str | None:
        """
        Return the mark about a task; None if there is none.

        Raises:
            StoreError: The server did not answer.
        """
        mark: bytes | None = self.lock_server.run(scripts.MARK, [mark_of(lock, task_id)])
        return None if mark is None else decode(mark)

    def close(self) -> None:
        """Close the connections that are not in use."""
        self.lock_server.close()


def _sent(ending: Ending, broker: str) -> tuple[Script, tuple[str | int, ...]]:
    """Return the script that ends leases in this way, and its arguments after the owner."""
    times = milliseconds(ending.at_least), broker, ending.ticket, milliseconds(ending.settles or 0)
    if ending.reservation is None:
        return scripts.RELEASE, times
    return scripts.RELEASE_UNIQUE, (*times, *ending.reservation.ends)
