"""What the lines of parked tasks answer, and how the sweep's replies are read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from celery_dislock.keys.names import task_id_of
from celery_dislock.keys.templates import key_of
from celery_dislock.servers.records import Conflict, decode, station_locks
from celery_dislock.words import plain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PARKED = "PARKED"  # state of the result while a task is in line


@dataclass(frozen=True)
class Parked(Conflict):
    """
    The task is in line: its *place* is 0 if it already has its turn.

    Attributes:
        replaced: Messages of the tasks that this one has replaced, by ticket; the caller ends them.
        told: Holders that must end for this task; the caller tells their workers.
    """

    replaced: Mapping[str, bytes] = field(default_factory=dict)
    told: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Full(Conflict):
    """
    The line is full.

    Attributes:
        waiting: Tasks in line.
    """

    waiting: int = 0


class Done(NamedTuple):
    """The task is done or set aside; this delivery is a copy."""


class Later(NamedTuple):
    """The task's ticket was written by a later release; only its workers can claim the turn."""


class Circle(NamedTuple):
    """Tasks that waited for each other's locks, as they take their locks in different orders."""

    began_anew: str  # the task that gave back what it kept, and is now last in its first line
    tasks: tuple[str, ...]  # each with the keys of its locks, in the order in which it takes them


class Head(NamedTuple):
    """A parked task that is first in line, and the terms of its ticket there."""

    lock: str  # its name in Redis
    task: str  # the name: "task":"..."
    terms: str  # as the scripts write them


class Swept(NamedTuple):
    """What the sweep found in the line of one lock."""

    parked: int  # tasks in line, or with their turn
    replaced: Mapping[str, bytes]  # as in Parked
    unclaimed: tuple[str, ...] = ()  # tickets of which nobody has claimed several turns in a row
    circles: tuple[Circle, ...] = ()  # found and opened by this sweep
    first: tuple[Head, ...] = ()  # in this line, and in those that its tasks have come to


class Dropped(NamedTuple):
    """A parked task that was taken out of line, and does not run."""

    message: bytes  # empty: the task's record could not be read, and is set aside
    ours: bool  # True: the caller reports the task's end; False: a sweep of the message's broker


def _circle(told: Sequence[bytes]) -> Circle:
    """Parse a circle that was opened; see ``_circles.lua``."""
    began_anew, *parts = told
    tasks = {
        decode(ticket): f"{plain(decode(name))}[{task_id_of(decode(ticket))}]"
        for ticket, name, _ in zip(*[iter(parts)] * 3, strict=True)
    }
    orders = [", ".join(map(key_of, station_locks(stations))) for stations in parts[2::3]]
    ordered = zip(tasks.values(), orders, strict=True)
    return Circle(tasks[decode(began_anew)], tuple(f"{task} ({keys})" for task, keys in ordered))


def messages(reply: Sequence[bytes]) -> dict[str, bytes]:
    """Parse tickets and their messages."""
    return dict(zip(map(decode, reply[::2]), reply[1::2], strict=True))


def swept(
    parked: int,
    replaced: Sequence[bytes],
    unclaimed: Sequence[bytes],
    circles: Sequence[Sequence[bytes]],
    first: Sequence[bytes],
) -> Swept:
    """Parse a reply of sweep.lua, without its turns."""
    return Swept(
        parked,
        messages(replaced),
        tuple(map(decode, unclaimed)),
        tuple(map(_circle, circles)),
        tuple(Head(*map(decode, names)) for names in zip(*[iter(first)] * 3, strict=True)),
    )
