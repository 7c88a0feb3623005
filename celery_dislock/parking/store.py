"""Parked tasks on a lock server: joining a line, leaving it, and finding all lines.

A parked task is stored under its ticket as the bytes of its message; see ``_parked.lua``.

An index lists the locks that have parked tasks, so that the sweep finds a line whose holder died.
The script that parks a task lists its lock; see ``_index.lua``.  Each broker has its own index,
because only a process with that broker can publish the tasks.
"""

from __future__ import annotations

import logging
from copy import copy
from functools import lru_cache
from secrets import token_hex
from typing import TYPE_CHECKING, Any, NamedTuple

from kombu.utils.json import dumps

from celery_dislock import scripts
from celery_dislock.config.terms import ALONE, terms_text
from celery_dislock.exceptions import DamagedLockError, StoreError
from celery_dislock.keys.templates import key_of
from celery_dislock.parking.answers import Done, Dropped, Full, Later, Parked, messages, swept
from celery_dislock.scripts import milliseconds
from celery_dislock.scripts.names import aside_of, index_of_lines
from celery_dislock.servers.connections import SOCKET_TIMEOUT
from celery_dislock.servers.records import Conflict, decode, holder_of
from celery_dislock.servers.replies import Granted, Replaced, turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from celery_dislock.config.terms import Terms
    from celery_dislock.parking.answers import Swept
    from celery_dislock.servers.replies import Turn
    from celery_dislock.servers.reservations import Reservation
    from celery_dislock.servers.server import Server


# How a task leaves its line; see leave.lua.
OVER, ENDED, RUNS, ASIDE, UNREAD = "over", "ended", "runs", "aside", "unread"
ASIDE_PAGE = 20  # tickets that were set aside: how many are read in one round trip, with messages
NAMES_TOGETHER = 500  # locks of the index that are read in one round trip
TASKS_MOST = 1000  # names of tasks whose text is remembered
APART = "{a}", "{b}"  # keys of different slots
FIRST = b"0"  # cursor of the first page, and after the last one

logger = logging.getLogger("celery_dislock")


class Bounds(NamedTuple):
    """Limits of one line of parked tasks, and what happens if the line is full."""

    # As park.lua names them.
    most: int = 0  # tasks waiting for their turn; 0: any number
    most_bytes: int = 2**26  # total size of the parked messages
    overflow: str = "skip"  # "skip" the new task, or "replace" the oldest


UNBOUNDED = Bounds()


class Ticket(NamedTuple):
    """What a task presents to be parked, or to claim its turn."""

    name: str  # the ticket's name
    marked: bool  # the message says that it was parked
    message: bytes = b""  # stored if the task is parked; empty: do not park
    task: str = ""  # the task's name; empty: not known
    terms: tuple[Terms, ...] = (ALONE,)  # of each lock, or of all; for a claim its ticket's count
    heeded: bool = True  # whether the code says these terms of these locks; see park.lua
    bounds: Bounds = UNBOUNDED  # of the line
    reservation: Reservation | None = None  # see Store.acquire()
    sent: int = 0  # when it was sent, for "cancel": UNIX time in microseconds; 0: it cancels nobody


class Lines:
    """
    The parked tasks of one broker on one lock server.

    Every method blocks for a round trip, and raises StoreError if the server did not answer: the
    request may have been done or not.  All methods but :meth:`sweep` are thread-safe.

    In the arguments, *lock* is the name of a lock in Redis, *ticket* a task's ticket, and *task*
    a task's name: another task with the same id is left in line.  Empty: the name is not known.

    Args:
        server: The lock server.
        prefix: Prefix of the locks' names in Redis.
        broker: Name of the broker, without spaces.
        hand_over: See :class:`celery_dislock.servers.store.Store`.
    """

    def __init__(
        self,
        server: Server,
        prefix: str,
        broker: str,
        hand_over: Callable[[Sequence[Turn]], None],
    ) -> None:
        self._server = server
        self._broker = broker
        self._hand_over = hand_over
        self._names = index_of_lines(prefix, broker)
        # In a cluster the index is on another node than most locks.
        self._is_apart = len(server.together(APART)) > 1

    def can_queue(self, locks: Sequence[str]) -> bool:
        """Tell whether a task can wait in line for these locks."""
        return len(locks) == 1 or not self._is_apart

    def park(
        self, locks: Sequence[str], owner: str, ttl: float, holder: str, ticket: Ticket
    ) -> Granted | Conflict | Done | Later:
        """
        Take a task's locks or claim its turn; otherwise park the task if it has a message.

        Args:
            locks: Names of the locks in Redis, in the order in which the task passes them.
            owner: Name of this acquisition, after that of its task; no two acquisitions share it.
            ttl: Expiry of the lease in seconds, > 0.
            holder: JSON object that describes the holder to others.
            ticket: The task's ticket, the message to park, and the terms of locks and line.

        Returns:
            Granted if the task may run, under the locks of its ticket.  A Conflict if a lock is
            held: Parked if the task is in line, Full if the line has no room, a plain Conflict if
            the task was not to be parked.  Done if the task is a copy of work that is done.  Later
            if its ticket was written by a later release.

        Raises:
            Replaced: The task must not run, because of the reservation or a newer task.
            StoreError: The server did not answer.  The lock may have been taken, or the task
                parked.
        """
        script, begins = (
            (scripts.PARK, ())
            if ticket.reservation is None
            else (scripts.PARK_UNIQUE, ticket.reservation.begins)
        )
        asked = {
            "owner": owner,
            "ttl": milliseconds(ttl),
            "holder": holder,
            "terms": terms_text(ticket.terms),
            "from_broker": self._broker,
            "ticket": ticket.name,
            "marked": int(ticket.marked),
            "message": ticket.message,
            **ticket.bounds._asdict(),
            "task": _written(ticket.task),
            "heeded": int(ticket.heeded),
            "sent": ticket.sent or "",
            "index": "" if self._is_apart else self._names,
            "listed": 0,
        }
        while True:
            reply, _ = self._server.exchange(script, locks, *script.arguments(asked), *begins)
            if reply[1]:
                self._hand_over(turns(reply[1]))
            if self._is_apart and reply[0] in {scripts.UNLISTED, scripts.PARKED}:
                self.enlist(locks[0])  # also when parked: a failover may have lost the entry
            if reply[0] != scripts.UNLISTED:
                return _answer(reply)
            asked["listed"] = reply[2]

    def handing_to(self, hand_over: Callable[[Sequence[Turn]], None]) -> Lines:
        """Return these lines with another function that is given the turns."""
        lines = copy(self)
        lines._hand_over = hand_over  # noqa: SLF001 -- a copy of this
        return lines

    def leave(self, lock: str, ticket: str, how: str = OVER, task: str = "") -> int:
        """
        Take a parked task out of line, and give its turn to the next.

        Args:
            lock: Name of the lock in Redis.
            ticket: The task's ticket.
            how: OVER: the task has ended.  The other ways change nothing if it has claimed its
                turn.  ENDED: it has ended, and may have sent itself again.  RUNS: it runs without a
                lock.  ASIDE: nobody can run it, and people can look at it.  UNREAD: as ASIDE, also
                for a task that was replaced.
            task: The task's name.

        Returns:
            HAS_LEFT: the task was in line, had its turn or was replaced; or with RUNS, nothing is
            known of it, or its claim was left.  LEFT_BEFORE: it has claimed its turn, was set aside
            or is done.
            NOT_THERE: none of these.
        """
        delivery = [f"{ticket}@{token_hex(8)}"] if how == RUNS else []
        call = (self._broker, ticket, how, _written(task), *delivery)
        (state,) = self._published(self._server.run(scripts.LEAVE, [lock], *call))
        return int(state)

    def knows(self, lock: str, ticket: str) -> bool:
        """Tell whether the server knows a parked task, which may wait, run or be done."""
        return bool(self._server.run(scripts.KNOWS, [lock], ticket))

    def drop(self, lock: str, ticket: str, note: str) -> Dropped | None:
        """
        Take a parked task out of line, or take its turn away; no copy of its message runs.

        Args:
            lock: Name of the lock in Redis.
            ticket: The task's ticket.
            note: Why, as a member of a JSON object: a header's name and its text.

        Returns:
            What was dropped; None if the task is not in line: it runs, is done, or was dropped.
        """
        reply, resent = self._server.exchange(scripts.DROP, [lock], self._broker, ticket, note)
        state, *rest = self._published(reply)
        if rest:
            message, ours = rest
            return Dropped(message, bool(ours))
        return Dropped(b"", ours=False) if state or resent else None

    def give_back(self, lock: str, ticket: str) -> None:
        """Put a parked task whose message could not be published back in line."""
        self._server.run(scripts.GIVE_BACK, [lock], ticket)

    def put_back(self, lock: str, ticket: str) -> str:
        """
        Put a ticket that was set aside at the end of its line.

        Returns:
            Why it was left; empty: it is in line, or was put back by another.  UNREAD: its record
            cannot be read, but its message may be.
        """
        self.enlist(lock)
        reply, _ = self._server.exchange(scripts.PUT_BACK, [lock], self._broker, ticket)
        (state,) = self._published(reply)
        return {2: UNREAD, 3: "it is in line or runs, by another message"}.get(state, "")

    def keep_turns(self, turns: Sequence[tuple[str, str]], *, within: float) -> list[bool]:
        """
        Keep turns whose messages wait in this process, in one pipelined round trip.

        Args:
            turns: Their locks and tickets.
            within: Seconds to connect if no connection is idle, and for each reply.

        Returns:
            Whether each turn was kept; if not, it is over, or a lock of it cannot be read.
        """
        return [
            kept == 1 for kept in self._server.run_many(scripts.KEEP_TURN, turns, within=within)
        ]

    def aside(self, lock: str, ticket: str = "") -> Iterator[tuple[str, bytes]]:
        """
        Read the tickets that were set aside beside a lock, in pages.

        Args:
            lock: Name of the lock in Redis.
            ticket: The only ticket that is wanted; empty: all.

        Returns:
            Each ticket, with the record or message that was kept.
        """
        cursor: bytes | None = None
        while cursor != FIRST:
            cursor, found = self._server.run(scripts.ASIDE, [lock], cursor or FIRST, ASIDE_PAGE)
            for ticket_id, kept in zip(*[iter(found)] * 2, strict=True):
                if not ticket or decode(ticket_id) == ticket:
                    yield decode(ticket_id), kept

    def forget_aside(self, lock: str, ticket: str) -> None:
        """Forget what was set aside under a ticket."""
        self._server.run(scripts.ASIDE, [lock], FIRST, 1, ticket)

    def take_out(
        self, turn: tuple[str, str], why: object, task: str = "", how: str = ASIDE
    ) -> bool:
        """
        Take a parked task that does not claim its turn out of line, and give the turn to the next.

        Logs a StoreError instead of raising it: the task has another turn later.

        Args:
            turn: Lock and ticket.
            why: Why the task does not claim its turn, for the log.
            task: The task's name; empty: it is not known.
            how: See :meth:`leave`.

        Returns:
            Whether it was taken out; if it was set aside, that is logged.
        """
        lock, ticket = turn
        what = f"{task}[{ticket}]" if task else ticket
        try:
            has_left = self.leave(lock, ticket, how, task) == scripts.HAS_LEFT
        except StoreError as exc:
            log_unrunnable(what, lock, why, exc)
            return False
        if has_left and how in {ASIDE, UNREAD}:
            log_unrunnable(what, lock, why)
        return has_left

    def enlist(self, lock: str) -> None:
        """Add a lock to the index."""
        self._server.run(scripts.ENLIST, [self._names], lock)

    def delist(self, lock: str, number: bytes) -> None:
        """
        Remove a lock without parked tasks from the index, if it was not enlisted lately.

        Args:
            lock: Name of the lock in Redis.
            number: The lock's number from :meth:`page`, read before the line was found empty;
                empty: it was enlisted lately, and stays.
        """
        if number:
            self._server.run(scripts.ENLIST, [self._names], lock, number)

    def page(self, cursor: bytes, count: int) -> tuple[int, bytes, Mapping[str, bytes]]:
        """
        Read one page of the index of locks that have, or recently had, parked tasks.

        Args:
            cursor: FIRST for the first page, then the cursor that the previous page returned.
            count: Approximate number of locks per page.

        Returns:
            The total number of locks, the cursor of the next page (FIRST after the last page), and
            the page: each lock's name with its number for :meth:`delist`.
        """
        total, cursor, found = self._server.run(scripts.LINES, [self._names], cursor, count)
        names = {decode(lock): seen for lock, seen in zip(*[iter(found)] * 2, strict=True)}
        return total, cursor, names

    def names(self) -> Iterator[str]:
        """Yield the names of the locks that have, or recently had, parked tasks; read in pages."""
        cursor: bytes | None = None
        seen: set[str] = set()
        while cursor != FIRST:
            _, cursor, page = self.page(cursor or FIRST, NAMES_TOGETHER)
            yield from (name for name in page if name not in seen)
            seen.update(page)

    def sweep(
        self, locks: Sequence[str], newer: Mapping[str, Sequence[Sequence[str]]] | None = None
    ) -> Mapping[str, Swept | DamagedLockError]:
        """
        Hand off locks that are free but were not handed off, in one pipelined round trip.

        Uses a connection of its own.  Call it from one thread only.

        Args:
            locks: Names of the locks in Redis.
            newer: By lock: tickets that were first, as sweep.lua takes them, with their terms now.

        Returns:
            By lock: what was found, or the error if the lock is damaged.  Locks that failed for
            another reason are missing.
        """
        if not locks:
            return {}
        calls: list[tuple[Any, ...]] = [
            (lock, self._broker, dumps((newer or {}).get(lock, []))) for lock in locks
        ]
        replies = self._server.run_many(scripts.SWEEP, calls, within=SOCKET_TIMEOUT)
        found: dict[str, Swept | DamagedLockError] = {}
        for lock, reply in zip(locks, replies, strict=True):
            if isinstance(reply, DamagedLockError):
                found[lock] = reply
            if not isinstance(reply, StoreError):
                found[lock] = swept(*self._published(reply))
        return found

    def _published(self, reply: Sequence[Any]) -> list[Any]:
        first, given, *rest = reply
        if given:
            self._hand_over(turns(given))
        return [first, *rest]


@lru_cache(TASKS_MOST)
def _written(task: str) -> str:
    """Write a task's name as it stands among the headers of a stored message."""
    return f'"task":{dumps(task)}' if task else ""


def _answer(reply: Sequence[Any]) -> Granted | Conflict | Done | Later:
    """Parse a reply of park.lua."""
    match reply:
        case [scripts.GRANTED, _, claimed, *granted]:
            return Granted(
                tuple(map(int, granted[1::2])), bool(claimed), tuple(map(decode, granted[::2]))
            )
        case [scripts.REFUSED, _, lock, place, *lease]:
            return Conflict.of(decode(lock), *lease, place=place)
        case [scripts.PARKED, _, lock, place, *lease, replaced, told]:
            ended = messages(replaced) if replaced else {}
            told = tuple(map(holder_of, told))
            return Parked.of(decode(lock), *lease, place=place, replaced=ended, told=told)
        case [scripts.FULL, _, lock, waiting, *lease]:
            return Full.of(decode(lock), *lease, waiting=waiting)
        case [scripts.REPLACED_BY, _, by]:
            raise Replaced(decode(by))
    return Later() if reply[0] == scripts.LATER else Done()


def log_unrunnable(what: str, lock: str, why: object, error: StoreError | None = None) -> None:
    """Log that a parked task cannot be run: it is set aside, unless that has failed."""
    becomes = f"is set aside in {aside_of(lock)}"
    if error is not None:
        becomes = f"stays in line until the lock server answers ({error})"
    #: ERROR `Parked task … for lock … cannot be run, and is set aside in …`: Its message is
    #: damaged, its task is not registered, another worker has ended it at each turn, or no worker
    #: of its release has come for a day. -> Put it back or drop it: `celery dislock put-back KEY`.
    #: ERROR `Parked task … for lock … cannot be run, and stays in line until the lock server
    #: answers …`: The reason follows, such as its end. It has another turn later. -> Check the lock
    #: server.
    logger.error(
        "Parked task %s for lock %r cannot be run, and %s: %s", what, key_of(lock), becomes, why
    )
