"""What a lock server answers, as Python has it."""

from __future__ import annotations

import json
import reprlib
from typing import TYPE_CHECKING, Any, NamedTuple

from celery_dislock.exceptions import StoreError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MODES = {"exclusive": "x", "shared": "s"}  # as the scripts write them
NAMES = {letter: mode for mode, letter in MODES.items()}


class Granted(NamedTuple):
    """The locks were taken, or their owner had them already."""

    tokens: tuple[int, ...]  # of each lock
    claimed: bool = False  # by a parked task, whose turn it was


class Refused(NamedTuple):
    """A lock does not admit another lease; of those in the way, the one that ends first."""

    owner: str
    remaining: float  # seconds
    holder: Mapping[str, Any]
    nth: int = 0  # of the locks asked for, the one that refused
    place: int = 0  # in line, that a task which can be parked would have


class Handed(NamedTuple):
    """The lock was handed over by whoever released it."""

    token: int
    ttl: float  # seconds from then on until the lease ends, unless renewed
    place_left: float  # seconds that the place in line would still have been kept then


class Turn(NamedTuple):
    """A parked task whose turn it is, for the caller to publish; or one that nobody can read."""

    lock: str  # its name in Redis
    ticket: str
    message: bytes | None  # empty: its record was damaged, and is set aside; None: it is gone


class Parked(NamedTuple):
    """The task is in line."""

    place: int  # counted from 1; 0: it has its turn already
    conflict: Refused
    replaced: Mapping[str, bytes] = {}  # tickets that made room, and their messages: to be told


class Full(NamedTuple):
    """There is no room in the line."""

    waiting: int  # in it
    conflict: Refused


class Done(NamedTuple):
    """This work is done: what came was a copy of it."""


class Swept(NamedTuple):
    """The line of a lock, looked at."""

    parked: int  # tasks in line, or with their turn
    replaced: Mapping[str, bytes]  # as above
    unclaimed: tuple[str, ...] = ()  # tickets that have not claimed many turns in a row


class Holding(NamedTuple):
    """A live lease."""

    owner: str
    remaining: float  # seconds
    token: int
    mode: str
    holder: Mapping[str, Any]
    expiring: bool = False  # its owner is done with it


def text(written: bytes) -> str:
    """Read a name from Redis, where anybody may have written it."""
    return written.decode(errors="replace")


def holder_of(written: bytes) -> Mapping[str, Any]:
    """Read who holds a lock, for messages; what was written by hand is shown as it is."""
    try:
        holder = json.loads(written)
    except (ValueError, RecursionError):
        holder = None
    return holder if isinstance(holder, dict) else {"unreadable": reprlib.repr(text(written))}


def refused(
    remaining_ms: int, owner: bytes, holder: bytes, *, nth: int = 0, place: int = 0
) -> Refused:
    """Read what a script tells of the lease that is in the way."""
    who = text(owner).removeprefix("~")
    return Refused(who, remaining_ms / 1000, holder_of(holder), nth, place)


def turns(reply: Sequence[bytes]) -> list[Turn]:
    """Read whose turn it is."""
    return [
        Turn(text(lock), text(ticket), message)
        for lock, ticket, message in zip(*[iter(reply)] * 3, strict=True)
    ]


def messages(reply: Sequence[bytes]) -> dict[str, bytes]:
    """Read tickets and their messages."""
    return {text(ticket): message for ticket, message in zip(*[iter(reply)] * 2, strict=True)}


def milliseconds(seconds: float) -> int:
    """Convert a duration, rounded up: a lease never ends before its time."""
    return -int(-seconds * 1000 // 1)


def holdings(reply: Sequence[Any]) -> list[Holding]:
    """Read the reply of holders.lua."""
    return [
        Holding(
            text(owner).removeprefix("~"),
            remaining / 1000,
            int(token),
            NAMES[mode.decode()],
            holder_of(holder),
            owner.startswith(b"~"),
        )
        for owner, remaining, token, mode, holder in zip(*[iter(reply)] * 5, strict=True)
    ]


def renewed(replies: Sequence[Any]) -> bool | StoreError:
    """Tell what the replies for the locks of one lease mean together."""
    if 0 in replies:
        return False
    return next((reply for reply in replies if isinstance(reply, StoreError)), True)
