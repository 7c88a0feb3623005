"""What the lock server knows of its locks: who holds them, who waits, what is reserved.

Nothing here changes a lock.  Times are those of the lock server: a lock is "held" since its
acquisition, by the clock that decides when its lease ends.
"""

from __future__ import annotations

import math
import re
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from celery_dislock.exceptions import DamagedLockError, StoreError
from celery_dislock.keys.names import reserved_lock, task_id_of
from celery_dislock.locks.attempt import in_words
from celery_dislock.scripts import LOOK
from celery_dislock.scripts.names import lock_in
from celery_dislock.servers.replies import (
    NAMES,
    bounded_text,
    holder_of,
    parsed,
    reading,
    renewed_ago,
    text,
)
from celery_dislock.servers.reservations import parse_record
from celery_dislock.servers.server import SOCKET_TIMEOUT, keys_pattern, scan
from celery_dislock.words import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from celery_dislock.servers.reservations import Record
    from celery_dislock.servers.server import Server

PLACES = 20  # of a line, unless more are asked for
SEARCHED = 200  # places in line that are looked at in one round trip
TROUBLES = ("damaged", "overdue", "stuck", "set aside", "paused")  # the worst first
OVERDUE = 2 / 3  # of the timeout without a renewal: two were missed
TOGETHER = 100  # locks that are looked at in one round trip: 1 or 2 ms of the server

# Numbers as the scripts bound them; see _record.lua.
_MS, _US, _COUNT = rb"(\d{1,15})", rb"(\d{1,18})", rb"(\d{1,15})"
_LIMIT = re.compile(rb"1 %b %b (.*)" % (_COUNT, _MS), re.DOTALL)
_WAITS = re.compile(rb"1 %b %b ([xs]) %b (.*)" % (_MS, _MS, _COUNT), re.DOTALL)
_PARKED = re.compile(rb"1 %b %b %b ([xs]) %b (\S+) 1 (.*)" % (_US, _COUNT, _MS, _COUNT), re.DOTALL)


class Holder(NamedTuple):
    """
    A live lease, for people.

    Attributes:
        owner: The string that identifies the acquisition.
        token: Its fencing token.
        mode: "exclusive" or "shared".
        held: Seconds since the acquisition.
        acquired_at: UNIX time of the acquisition.
        remaining: Seconds until the lease ends, unless it is renewed again.
        renewed: Seconds since the last renewal, or since the acquisition; None if the holder's
            version does not say, and for a fixed expiry.
        expiring: Whether the owner is done with it, and it is left to expire.
        turn: Whether the lock is reserved for a parked task whose message is on its way.
        who: The holder in words.
        task, id, worker, pid, host, thread: The holder; None where it has none.
    """

    owner: str
    token: int
    mode: str
    held: float
    acquired_at: float
    remaining: float
    renewed: float | None
    expiring: bool
    turn: bool
    who: str
    task: str | None
    id: str | None
    worker: str | None
    pid: int | None
    host: str | None
    thread: str | None

    @property
    def can_be_terminated(self) -> bool:
        """Whether it is a task that a worker runs, which a worker can be told to end."""
        return bool(self.id and self.worker) and not (self.turn or self.expiring)

    @property
    def is_renewed(self) -> bool:
        """
        Whether somebody renews it.

        A lease is renewed after each third of its timeout.  One that was not renewed for half of it
        has nobody who renews it.
        """
        return self.timeout is not None and (self.renewed or 0.0) < self.remaining

    @property
    def may_live(self) -> bool:
        """Whether its process may still run, as far as the lease tells; a fixed expiry does not."""
        return self.is_renewed or (self.renewed is None and not (self.expiring or self.turn))

    @property
    def timeout(self) -> float | None:
        """Seconds from a renewal to the end of the lease; None: nobody has to renew it."""
        if self.renewed is None or self.expiring or self.turn:
            return None
        return self.renewed + self.remaining

    @property
    def is_overdue(self) -> bool:
        """Whether two renewals were missed: its process is dead, stopped, or cut off."""
        return self.timeout is not None and (self.renewed or 0.0) > OVERDUE * self.timeout


class Place(NamedTuple):
    """
    A place in line, or a turn.

    Attributes:
        place: Place in line, from 1; 0: it has its turn, and its message is on its way.
        waiting: Seconds since it joined the line.
        mode: "exclusive" or "shared".
        parked: Whether it is a parked task; else a worker slot or a thread waits.
        ticket: The ticket of a parked task; empty: it is not parked.
        turns: How often the parked task was given its turn.
        who: The waiter in words.
        task, id: The task; None if a thread waits, or the message cannot be read.
        args: The task's arguments, as Celery describes them in the message; None: not known.
        exchange, routing_key: Where its message goes when it has its turn; None: it is not parked,
            or its message cannot be read.
        broker: Digest of the URL of the broker that its message came from; None as above.
    """

    place: int
    waiting: float
    mode: str
    parked: bool
    ticket: str
    turns: int
    who: str
    task: str | None
    id: str | None
    args: str | None
    exchange: str | None = None
    routing_key: str | None = None
    broker: str | None = None


class LockState(NamedTuple):
    """
    All that the lock server knows of a lock.

    Attributes:
        key: The key.
        name: The lock's name in Redis.
        holders: Its live leases.
        waiting: How many stand in line.
        line: The first of them.
        turns: Parked tasks that have their turn, and have not claimed it.
        aside: How many parked tasks were set aside because nobody could read or run them.
        reservation: The reservation of the key; None if there is none.
        limit: How many leases an operator admits, whatever the code says; 0: it is paused.  None:
            the code's limit holds.
        limit_remaining: Seconds until that ends; None: it lasts until it is taken back.
        limit_since: UNIX time at which it was set; None: no limit is set.
        limit_note: Why, and by whom; empty: nothing was said.
        limit_differs: Of several independent servers, how many have another limit: they were away
            when it was set or taken back.
        limit_age: Seconds since it was set; None: no limit is set.
    """

    key: str
    name: str
    holders: Sequence[Holder]
    waiting: int
    line: Sequence[Place]
    turns: Sequence[Place]
    aside: int
    reservation: Record | None
    limit: int | None
    limit_remaining: float | None
    limit_since: float | None
    limit_note: str
    limit_differs: int = 0
    limit_age: float | None = None

    @property
    def is_overdue(self) -> bool:
        """Whether a holder has missed two renewals."""
        return any(holder.is_overdue for holder in self.holders)

    @property
    def is_paused(self) -> bool:
        """Whether an operator admits nobody."""
        return self.limit == 0

    @property
    def is_stuck(self) -> bool:
        """Whether others wait for a lock that nobody holds and nobody has paused."""
        return bool(self.waiting) and not (self.holders or self.is_paused)

    @property
    def troubles(self) -> list[str]:
        """What keeps tasks from running: some of :data:`TROUBLES`, in that order."""
        is_so = (False, self.is_overdue, self.is_stuck, self.aside, self.is_paused)
        return [what for what, so in zip(TROUBLES, is_so, strict=True) if so]

    @property
    def exists(self) -> bool:
        """Whether the lock server knows anything of it."""
        return bool(
            self.holders or self.waiting or self.turns or self.aside or self.reservation
        ) or bool(self.limit is not None or self.limit_differs)


class Overview:
    """
    Reads the locks of a lock server.  Each method blocks for its round trips; thread-safe.

    Args:
        server: The lock server.
        prefix: Prefix of the locks' names in Redis.
    """

    def __init__(self, server: Server, prefix: str) -> None:
        self._server = server
        self._prefix = prefix
        self._mutex = threading.Lock()  # run_many() is for one thread

    def lock(self, name: str, first: int = 0, most: int = PLACES) -> LockState:
        """
        Look at one lock.

        Args:
            name: Its name in Redis.
            first: Place in line to begin with, from 0.
            most: Maximum number of places.

        Raises:
            DamagedLockError: A record of the lock cannot be read.
            StoreError: The server did not answer.
        """
        reply = self._server.run(LOOK, [name], first, most)
        with reading(self._server.name, name):
            return seen(name, reply, first)

    def locks(
        self, pattern: str = "*", failed: list[StoreError] | None = None
    ) -> Iterator[LockState | StoreError]:
        """
        Look at all locks whose keys match, without their lines.

        The names are read in pages, so that the server answers others in between.  A lock that
        comes or goes meanwhile may be there or not.

        Args:
            pattern: Pattern of keys, with Redis's wildcards ``*``, ``?`` and ``[a-z]``.
            failed: See :meth:`names`.

        Returns:
            Each lock once, in no order; the error of one that cannot be read.

        Raises:
            StoreError: A server did not answer.
        """
        for names in self.names(pattern, failed):
            yield from self.look(names)

    def names(
        self, pattern: str = "*", failed: list[StoreError] | None = None
    ) -> Iterator[list[str]]:
        """
        List the names of locks whose keys match, each once, in pages of :data:`TOGETHER`.

        Args:
            pattern: See :meth:`locks`.
            failed: Takes the error of each server that did not answer, in place of raising it: the
                others are read nevertheless.

        Raises:
            StoreError: A server did not answer; of several independent servers, no majority did.
                With *failed*: none did.
        """
        told: set[str] = set()
        page: list[str] = []
        errors: list[StoreError] = []
        senders = self._server.senders()
        for send in senders:
            for found in _scanned(send, keys_pattern(self._prefix, pattern), errors):
                for redis_key in found:
                    name = lock_in(redis_key)
                    if name is None or name in told:
                        continue
                    told.add(name)
                    page.append(name)
                    if len(page) == TOGETHER:
                        yield page
                        page = []
        if page:
            yield page
        answered = len(senders) - len(errors)
        enough = len(senders) // 2 + 1 if self._server.kind == "quorum" else len(senders)
        if errors and answered < (enough if failed is None else 1):
            raise errors[0]
        if failed is not None:
            failed += errors

    def look(self, names: Sequence[str]) -> list[LockState | StoreError]:
        """Look at several locks, without their lines, in one pipelined round trip."""
        calls = [(name, 0, 0) for name in names]
        with self._mutex:
            replies = self._server.run_many(LOOK, calls, within=SOCKET_TIMEOUT)
        return [
            reply if isinstance(reply, StoreError) else self._seen(name, reply)
            for name, reply in zip(names, replies, strict=True)
        ]

    def _seen(self, name: str, reply: Sequence[Any]) -> LockState | StoreError:
        try:
            with reading(self._server.name, name):
                return seen(name, reply)
        except DamagedLockError as exc:  # the others can be read
            return exc


def look_at_all(overview: Overview, names: Sequence[str], most: int = PLACES) -> list[LockState]:
    """
    Look at the locks that one task takes, in this order.

    Returns:
        The state of each.  One more follows if their keys are reserved together.

    Raises:
        DamagedLockError, StoreError: As for :meth:`Overview.lock`.
    """
    found = [overview.lock(name, most=most) for name in names]
    together = overview.lock(reserved_lock(names), most=0) if len(names) > 1 else None
    return [*found, together] if together is not None and together.exists else found


def find_parked(overview: Overview, name: str, wanted: str) -> list[Place]:
    """
    Return the parked tasks of a ticket or a task id in one line, read in pages.

    Raises:
        StoreError: The server did not answer.
    """
    found: dict[str, Place] = {}
    first, seen_all = 0, False
    while not seen_all:
        lock = overview.lock(name, first, SEARCHED)
        for place in (*lock.turns, *lock.line):
            if place.parked and wanted in {place.ticket, place.id}:
                found[place.ticket] = place
        first += SEARCHED
        seen_all = first >= lock.waiting
    return list(found.values())


def _scanned(
    send: Callable[..., Any], pattern: str, errors: list[StoreError]
) -> Iterator[list[str]]:
    try:
        yield from scan(send, pattern)
    except StoreError as exc:
        errors.append(exc)


def seen(name: str, reply: Sequence[Any], first: int = 0) -> LockState:
    """
    Parse the reply of look.lua, which was asked for the line from *first* on.

    Raises:
        Exception: As for :func:`celery_dislock.servers.replies.reading`: something cannot be read
            without which the lock cannot be used.
    """
    now_ms, leases, waiting, line, turns, aside, unique, limit, limit_ms, *differs = reply
    limited = _LIMIT.fullmatch(limit)
    if limit and not limited:
        raise ValueError("its limit")
    return LockState(
        key=shown_key(name),
        name=name,
        holders=[_holder(now_ms, *lease) for lease in zip(*[iter(leases)] * 6, strict=True)],
        waiting=waiting,
        line=[
            _place(now_ms, nth, *one)
            for nth, one in enumerate(zip(*[iter(line)] * 3, strict=True), first + 1)
        ],
        turns=[
            _parked(now_ms, 0, text(ticket), record)
            for ticket, _, record in zip(*[iter(turns)] * 3, strict=True)
        ],
        aside=aside,
        reservation=parse_record(now_ms, unique),
        limit=int(limited[1]) if limited else None,
        limit_remaining=limit_ms / 1000 if limited and limit_ms >= 0 else None,
        limit_since=int(limited[2]) / 1000 if limited else None,
        limit_note=bounded_text(text(limited[3])) or "" if limited else "",
        limit_differs=differs[0] if differs else 0,
        limit_age=(now_ms - int(limited[2])) / 1000 if limited else None,
    )


REPEAT = "Set it again while all of them answer, or take it back"


def differing(lock: LockState) -> str:
    """Say that independent servers disagree about the limit of a lock."""
    have = "1 server has" if lock.limit_differs == 1 else f"{lock.limit_differs} servers have"
    most = "no limit" if lock.limit is None else "a pause" if lock.limit == 0 else "a limit"
    return f"most servers have {most}, {have} another state"


def shown_key(name: str) -> str:
    """Return a lock's key for people, given the lock's name in Redis."""
    key, _, several = name.partition("{")[2].rpartition("}")
    return f"{key} and others" if several else key


_NAMES = ("task", "id", "worker", "host", "thread")  # of a holder that are text


def _holder(
    now_ms: int, owner: bytes, expires: int, token: bytes, mode: bytes, holder: bytes, acquired: int
) -> Holder:
    about = holder_of(holder)
    remaining, held = (expires - now_ms) / 1000, (now_ms - acquired) / 1000
    return Holder(
        owner=text(owner).removeprefix("~"),
        token=int(token),
        mode=NAMES[mode.decode()],
        held=held,
        acquired_at=acquired / 1000,
        remaining=remaining,
        renewed=None if owner.startswith(b"~") else renewed_ago(about, remaining, held),
        expiring=owner.startswith(b"~"),
        turn="parked" in about,
        who=in_words(about),
        pid=pid if type(pid := about.get("pid")) is int else None,
        **{name: bounded_text(about.get(name)) for name in _NAMES},
    )


def _place(now_ms: int, nth: int, member: bytes, joined: bytes, record: bytes) -> Place:
    if member.endswith(b"#"):
        return _parked(now_ms, nth, text(member[:-1]), record)
    waits = _WAITS.fullmatch(record)
    about: Mapping[str, Any] = holder_of(waits[5]) if waits else {}
    return Place(
        place=nth,
        waiting=_since(now_ms, joined),
        mode=NAMES[waits[3].decode()] if waits else "exclusive",
        parked=False,
        ticket="",
        turns=0,
        who=in_words(about),
        task=bounded_text(about.get("task")),
        id=bounded_text(about.get("id")),
        args=None,
    )


def _since(now_ms: int, joined: bytes) -> float:
    """Return the seconds since somebody joined a line; 0 if its score is no time."""
    try:
        seconds = now_ms / 1000 - float(joined) / 1e6
    except ValueError:
        return 0.0
    return seconds if math.isfinite(seconds) and abs(seconds) < now_ms else 0.0


def _parked(now_ms: int, nth: int, ticket: str, record: bytes) -> Place:
    parked = _PARKED.fullmatch(record)
    message: Mapping[str, Any] = parsed(parked[7]) if parked else {}
    headers = message.get("headers")
    if not isinstance(headers, dict):
        message, headers = {}, {}
    task = bounded_text(headers.get("task"))
    task_id = bounded_text(headers.get("id")) or task_id_of(ticket)
    given = [bounded_text(headers.get(name)) for name in ("argsrepr", "kwargsrepr")]
    return Place(
        place=nth,
        waiting=now_ms / 1000 - int(parked[1]) / 1e6 if parked else 0.0,
        mode=NAMES[parked[4].decode()] if parked else "exclusive",
        parked=True,
        ticket=ticket,
        turns=int(parked[2]) if parked else 0,
        who=plain(f"{task or '?'}[{task_id}]"),
        task=task,
        id=task_id,
        args=" ".join(filter(None, given)) or None,
        exchange=bounded_text(message.get("exchange")),
        routing_key=bounded_text(message.get("routing_key")),
        broker=bounded_text(text(parked[6])) if parked else None,
    )
