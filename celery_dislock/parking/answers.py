"""What the lines of parked tasks answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from celery_dislock.servers.records import Conflict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class Parked(Conflict):
    """
    The task is in line: its *place* is 0 if it already has its turn.

    Attributes:
        replaced: Tasks that lost their places, whom the caller ends: their messages, by ticket.
        told: Holders that must end for this task, whose workers the caller tells.
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
    """The task's ticket was written by a later release, which alone can claim its turn."""


class Circle(NamedTuple):
    """Tasks that waited for each other's locks, as they take them in different orders."""

    began_anew: str  # the task that gave back what it kept, and is last in its lines
    tasks: tuple[str, ...]  # each with the keys of its locks, in its order


class Swept(NamedTuple):
    """What the sweep found in the line of one lock."""

    parked: int  # tasks in line, or with their turn
    replaced: Mapping[str, bytes]  # as in Parked
    unclaimed: tuple[str, ...] = ()  # tickets that did not claim several turns in a row
    circles: tuple[Circle, ...] = ()  # that were found and opened


class Dropped(NamedTuple):
    """A parked task that was taken out of line, and is not to run."""

    message: bytes  # empty: its record could not be read, and is set aside
    ours: bool  # the caller tells its end; else a worker of the message's broker does, at a sweep
