"""Who waits in a line, for people: waiters and parked tasks, as ``look.lua`` tells of them.

A parked task of several locks passes them one after the other, each a station.  Its record is
beside the first lock, and it stands in the line of one of them; see ``_parked.lua``.  Place and
mode are those in the lock that was looked at.  Keys, ids and messages may come from anybody, and a
record may be damaged: it is shown as far as it can be read.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from celery_dislock.config.terms import LIMIT_MOST, parse_terms
from celery_dislock.keys.names import task_id_of
from celery_dislock.keys.templates import key_of
from celery_dislock.servers.records import bounded_text, decode, holder_of, in_words, parse_object
from celery_dislock.words import plain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

UNREADABLE = "?"  # stands for stations that cannot be read

# Numbers as the scripts bound them; see _record.lua.
MS, US, COUNT = rb"(\d{1,15})", rb"(\d{1,18})", rb"(\d{1,15})"
# Later versions of a record begin with the same fields; what comes after them is not known here.
_WAITS = re.compile(rb"\d{1,9} %b %b (\S+) (.*)" % (MS, MS), re.DOTALL)
_PARKED = re.compile(rb"\d{1,9} %b %b %b (\S+) %b (.*)\n\d{1,9} (.*)" % (US, COUNT, MS, COUNT))
_MEMBER = re.compile(rb"(\d{1,9})/(.*)##", re.DOTALL)
BROKER = 4  # index of the broker among the fields of a ticket's record
_MESSAGE = re.compile(rb'\d{1,9} {"')  # how a message begins, after the fields of such a record


class Waiter(NamedTuple):
    """
    A waiter or a parked task: it stands in line, or has its turn.

    Attributes:
        place: Place in line, from 1; 0: it has its turn, and its message is on its way.
        waiting: Seconds since it joined the line; if it has its turn, since it was parked.
        mode: "exclusive" or "shared": the mode in which it takes this lock.
        parked: Whether it is a parked task.  False: a worker slot or a thread waits.
        ticket: The ticket of a parked task; empty: it is not parked.
        turns: How often the parked task was given its turn.
        who: The waiter in words.
        task, id: The task; None if a thread waits, or the message cannot be read.
        thread: The thread; None if a task waits.
        args: The task's arguments, as Celery describes them in the message; None: not known.
        exchange, routing_key: Where its message goes when it has its turn; None: it is not parked,
            or its message cannot be read.
        broker: Digest of the URL of the broker that its message came from; None as above.
        stations: Keys of all locks of a parked task, in the order in which it passes them; empty:
            it has one.
        keeps: Keys of the locks that it has passed, and keeps while it waits.
        parked_for: Seconds since the task was parked; None: it is not parked.
        beside: Name in Redis of the lock that has the record of the parked task; empty: it is the
            lock that was looked at.
        cost: Units of the limit that it needs, and starts of the rate that it counts for.
        limit: Units that its code admits at a time; None: any number.
    """

    place: int
    waiting: float
    mode: str
    who: str
    task: str | None
    id: str | None
    thread: str | None = None
    parked: bool = False
    ticket: str = ""
    turns: int = 0
    args: str | None = None
    exchange: str | None = None
    routing_key: str | None = None
    broker: str | None = None
    stations: Sequence[str] = ()
    keeps: Sequence[str] = ()
    parked_for: float | None = None
    beside: str = ""
    cost: int = 1
    limit: int | None = 1


@dataclass(frozen=True)
class Place:
    """
    Where a parked task stands in line, and when it starts, as the lock server knew it when asked.

    Attributes:
        key: Key of the lock in whose line it stands.  A task of several locks passes one line after
            the other; once it has its turn this is the first.
        nth: Its place, from 1.  0: it has its turn, and its message is on its way to a worker.
        of: How many stand in that line, >= *nth*; who has a turn is not counted.
        starts_in: Seconds, >= 0, until it may start; None: not known, as while the lock is paused,
            while others wait for a later one of its locks, and before a body has ended for which
            somebody waited.
        is_estimate: False: *starts_in* is a time at which a rate, or a hold-back, lets the task
            start.  It holds to the millisecond if all in line have the same rate, each of them
            starts when it may, and nobody passes the line.  True: it was reckoned from how long the
            last bodies took, or those before it were taken to cost as much as it does, or the task
            starts as soon as a worker takes its message: show it as a rough time, and conclude
            nothing from it.
    """

    key: str
    nth: int
    of: int
    starts_in: float | None
    is_estimate: bool


class Standing(NamedTuple):
    """
    What ``where.lua`` tells of a waiter or a parked task.

    Attributes:
        lock: Name in Redis of the lock in whose line it is; its first lock if it has its turn.
        waiter: The waiter or parked task.
        place: The same for an application's own pages.
        turn_ends: Seconds until its turn ends; None: it has no turn.
        is_lost: Whether it is in no line, and has no turn: the sweep puts it back.
    """

    lock: str
    waiter: Waiter
    place: Place
    turn_ends: float | None
    is_lost: bool


def parse_standing(reply: Sequence[Any] | None) -> Standing | None:
    """Parse a reply of ``where.lua``; None: nobody who was asked for waits."""
    if reply is None:
        return None
    now_ms, at, rank, member, joined, record, ends_ms, of, starts_ms, is_estimate = reply
    lock, nth = decode(at), rank + 1
    starts_in = starts_ms / 1000 if starts_ms >= 0 else None
    turn_ends = (ends_ms - now_ms) / 1000 if ends_ms else None
    return Standing(
        lock,
        parse_place(lock, now_ms, nth, member, joined, record),
        Place(key_of(lock), nth, of, starts_in, bool(is_estimate)),
        turn_ends,
        is_lost=not nth and turn_ends is None,
    )


def parse_place(
    name: str, now_ms: int, nth: int, member: bytes, joined: bytes, record: bytes
) -> Waiter:
    """
    Parse a place in line.

    Args:
        name: Name in Redis of the lock whose line it is.
        now_ms: Redis TIME.
        nth: The place, from 1.
        member: The member of the line; see ``_line.lua``.
        joined: The member's score.
        record: The record of what it waits for; see look.lua.
    """
    if member.endswith(b"#"):
        place = parked_place(name, now_ms, nth, member, record)
        return place._replace(waiting=max(0.0, _since(now_ms, joined)))
    waits = _WAITS.fullmatch(record)
    about: Mapping[str, Any] = holder_of(waits[4]) if waits else {}
    return Waiter(
        place=nth,
        waiting=_since(now_ms, joined),
        **_of_terms(waits[3] if waits else b""),
        who=in_words(about),
        task=bounded_text(about.get("task")),
        id=bounded_text(about.get("id")),
        thread=bounded_text(about.get("thread")),
    )


def parked_place(name: str, now_ms: int, nth: int, member: bytes, record: bytes) -> Waiter:
    """Parse a parked task, as :func:`parse_place` does; place 0: it has passed all its locks."""
    ticket, beside = ticket_of_member(member)
    parked = _PARKED.fullmatch(record)
    message: Mapping[str, Any] = parse_object(parked[7]) if parked else {}
    headers = message.get("headers")
    if not isinstance(headers, dict):
        message, headers = {}, {}
    task = bounded_text(headers.get("task"))
    task_id = bounded_text(headers.get("id")) or task_id_of(ticket)
    given = [bounded_text(headers.get(name)) for name in ("argsrepr", "kwargsrepr")]
    parked_for = max(0.0, now_ms / 1000 - int(parked[1]) / 1e6) if parked else 0.0
    names, words = _stations(parked[6] if parked else b"")
    here = names.index(name) if name in names else 0
    stations = list(map(_shown_key, names))
    return Waiter(
        place=nth,
        waiting=parked_for,
        **_of_terms(words[here]),
        parked=True,
        ticket=ticket,
        turns=int(parked[2]) if parked else 0,
        who=plain(f"{task or '?'}[{task_id}]"),
        task=task,
        id=task_id,
        args=" ".join(filter(None, given)) or None,
        exchange=bounded_text(message.get("exchange")),
        routing_key=bounded_text(message.get("routing_key")),
        broker=bounded_text(decode(parked[4])) if parked else None,
        stations=stations,
        keeps=stations[:here] if nth else stations,
        parked_for=parked_for,
        beside=beside,
    )


def _of_terms(word: bytes) -> dict[str, Any]:
    """Return what the terms in a record say of a waiter."""
    terms = parse_terms(word)
    limit = None if terms.limit == LIMIT_MOST else terms.limit
    return {"mode": terms.mode, "cost": terms.cost or 1, "limit": limit}


def _stations(written: bytes) -> tuple[list[str], list[bytes]]:
    """
    Parse the locks in a parked task's record.

    Returns:
        Their names, in order; empty if there is one lock, UNREADABLE if they cannot be read; and
        the terms of each.
    """
    if not written.startswith(b"["):
        return [], [written.partition(b" ")[0]]
    try:
        found = [(name, word.encode()) for name, word, *_ in json.loads(written)]
    except (ValueError, TypeError, AttributeError, RecursionError):
        found = []
    if not found or not all(isinstance(name, str) for name, _ in found):
        found = [(UNREADABLE, b"")]
    return [name for name, _ in found], [word for _, word in found]


def _shown_key(name: str) -> str:
    return bounded_text(key_of(name)) or UNREADABLE


def ticket_of_member(member: bytes) -> tuple[str, str]:
    """
    Return the ticket of a member of a line, or of the owner of a unit that a ticket keeps.

    Returns:
        The ticket, and the name in Redis of the lock that has its record; empty: it is the lock
        where the member is.
    """
    elsewhere = _MEMBER.fullmatch(member)
    if elsewhere is None:  # or nobody can read it
        return decode(member.removesuffix(b"#")), ""
    length, rest = int(elsewhere[1]), elsewhere[2]
    return decode(rest[length:]), decode(rest[:length])


def _since(now_ms: int, joined: bytes) -> float:
    """Return the seconds since a member joined its line; 0 if its score is no time."""
    try:
        seconds = now_ms / 1000 - float(joined) / 1e6
    except ValueError:
        return 0.0
    return seconds if math.isfinite(seconds) and abs(seconds) < now_ms else 0.0


def parked_message(kept: bytes) -> tuple[bytes, str | None]:
    """
    Return the message of a ticket that was set aside, given its record, or its message alone.

    Returns:
        The message, as it was stored, and the digest of its broker's URL; None: not known.
    """
    begins = _MESSAGE.search(kept)
    start = begins.start() if begins else 0
    record = kept[:start].split()
    return kept[start:], decode(record[BROKER]) if len(record) > BROKER else None
