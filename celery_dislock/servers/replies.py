"""Parse the replies of a lock server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from celery_dislock.exceptions import StoreError
from celery_dislock.scripts import REPLACED_BY, TAKE_UP_MS
from celery_dislock.servers.records import holder_of, renewed_ago, text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TAKE_UP = TAKE_UP_MS / 1000  # seconds for a waiter to take up a lease that it was handed


class Granted(NamedTuple):
    """The locks were taken, or the owner already held them."""

    tokens: tuple[int, ...]  # fencing token of each lock
    claimed: bool = False  # the task was parked, and this is its claim


@dataclass(frozen=True)
class Refused:
    """
    A lock was refused.  Of several leases in the way, this is the one that ends first.

    Attributes:
        owner: Owner of that lease.
        remaining: Seconds until it ends, unless it is renewed.
        holder: How its holder describes itself.
        nth: Index of the lock that refused, among the locks asked for.
        place: Place in line, from 1, that the task would get if it were parked; 0: none.
        held_for: Seconds since the acquisition; None: not known.
        renewed: Seconds since the last renewal, or the acquisition if there was none since; None:
            not known, or the lease has a fixed expiry.
    """

    owner: str
    remaining: float
    holder: Mapping[str, Any]
    nth: int = 0
    place: int = 0
    # For messages: refusals that differ in nothing else are equal.
    held_for: float | None = field(default=None, compare=False)
    renewed: float | None = field(default=None, compare=False)


class Replaced(Exception):  # noqa: N818 -- an answer, which ends what asked for the lock
    """The task does not run: the message of another task has replaced its own.

    Attributes:
        by: Id of that task, as reserved_name() writes it.
    """

    def __init__(self, by: str) -> None:
        super().__init__(by)
        self.by = by


class Handed(NamedTuple):
    """A hand-off: the waiter was given the lock."""

    token: int
    ttl: float  # seconds from the hand-off until the lease ends, unless renewed
    place_left: float  # seconds for which the place in line was still kept at the hand-off


class FirstInLine(NamedTuple):
    """The waiter is the first in line now: another was handed the lock, for TAKE_UP at most."""


class Turn(NamedTuple):
    """A parked task that has its turn and must be published, or whose record cannot be read."""

    lock: str  # name of the lock in Redis
    ticket: str
    message: bytes | None  # empty: the record was damaged and is set aside; None: it is gone
    delay: float = 0.0  # seconds until the task may start, if only the time is in its way


class Looked(NamedTuple):
    """
    What was found of an execution whose process may be stalled.

    Attributes:
        unrenewed: Seconds for which its lease had not been renewed; it is renewed now.  0: it was
            not overdue.
        overdue_in: Seconds until it is overdue; 0: it has no lease to be renewed, or was renewed.
    """

    unrenewed: float
    overdue_in: float


def refused(
    remaining_ms: int,
    owner: bytes,
    holder: bytes,
    held_ms: int = -1,
    *,
    nth: int = 0,
    place: int = 0,
) -> Refused:
    """Parse a refusal of a script: the lease that is in the way."""
    remaining, who = remaining_ms / 1000, holder_of(holder)
    held_for = renewed = None
    if held_ms >= 0:  # less: not known, or the server's clock was set back
        held_for = held_ms / 1000
        if not owner.startswith(b"~"):
            renewed = renewed_ago(who, remaining, held_for)
    return Refused(text(owner).removeprefix("~"), remaining, who, nth, place, held_for, renewed)


def refusal(reply: Sequence[Any], before: int = 0) -> Refused:
    """
    Parse a reply of acquire.lua that grants nothing: the lease that is in the way.

    Args:
        reply: The reply.
        before: How many of the locks that were asked for come before these.

    Raises:
        Replaced: The task must not run.
    """
    state, *answer = reply
    if state == REPLACED_BY:
        raise Replaced(text(answer[-1]))
    nth, *lease = answer
    return refused(*lease, nth=before + nth)


def turns(reply: Sequence[Any]) -> list[Turn]:
    """Parse the parked tasks that have their turn."""
    return [
        Turn(text(lock), text(ticket), message, delay_ms / 1000)
        for lock, ticket, message, delay_ms in zip(*[iter(reply)] * 4, strict=True)
    ]


def renewed(replies: Sequence[Any]) -> bool | StoreError:
    """
    Combine the replies to the renewals of one lease's locks.

    Returns:
        False if a lock is no longer held; else the first error, if there is one; else True.
    """
    if 0 in replies:
        return False
    return next((reply for reply in replies if isinstance(reply, StoreError)), True)


def looked(replies: Sequence[Any]) -> Looked | StoreError:
    """Combine the replies about one execution's locks; the first error, if there is one."""
    error = next((reply for reply in replies if isinstance(reply, StoreError)), None)
    if error is not None:
        return error
    soon = min((-reply for reply in replies if reply < 0), default=0)
    return Looked(max(0, *replies) / 1000, soon / 1000)
