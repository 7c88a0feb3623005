"""What the lines of parked tasks answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from celery_dislock.servers.replies import Refused


class Parked(NamedTuple):
    """The task is in line.  The caller ends the tasks that were replaced."""

    place: int  # counted from 1; 0: the task already has its turn
    conflict: Refused
    replaced: Mapping[str, bytes] = {}  # ticket -> message: tasks that lost their place


class Full(NamedTuple):
    """The line is full."""

    waiting: int  # tasks in line
    conflict: Refused


class Done(NamedTuple):
    """The task is done or set aside; this delivery is a copy."""


class Later(NamedTuple):
    """The task's ticket was written by a later release, which alone can claim its turn."""


class Swept(NamedTuple):
    """What the sweep found in the line of one lock."""

    parked: int  # tasks in line, or with their turn
    replaced: Mapping[str, bytes]  # as in Parked
    unclaimed: tuple[str, ...] = ()  # tickets that did not claim several turns in a row


class Dropped(NamedTuple):
    """A parked task that was taken out of line, and is not to run."""

    message: bytes  # empty: its record could not be read, and is set aside
    ours: bool  # the caller tells its end; else a worker of the message's broker does, at a sweep
