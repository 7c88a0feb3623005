"""Parse the replies of a lock server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from celery_dislock.exceptions import StoreError
from celery_dislock.keys.names import task_id_of_reserved
from celery_dislock.scripts import REPLACED_BY, TAKE_UP_MS
from celery_dislock.servers.records import Conflict, decode

if TYPE_CHECKING:
    from collections.abc import Sequence

TAKE_UP = TAKE_UP_MS / 1000  # seconds for a waiter to take up a lease that it was handed


class Granted(NamedTuple):
    """The locks were taken, or the owner already held them."""

    tokens: tuple[int, ...]  # fencing token of each lock
    claimed: bool = False  # the task was parked, and this is its claim
    locks: tuple[str, ...] = ()  # names in Redis of the locks, if they are those of a ticket


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
    """The waiter is now the first in line; another has at most TAKE_UP to take the lock up."""


class Turn(NamedTuple):
    """A parked task that has its turn and must be published, or whose record cannot be read."""

    lock: str  # name of the lock in Redis
    ticket: str
    message: bytes | None  # empty: the record was damaged and is set aside; None: it is gone
    delay: float = 0.0  # seconds until the task may start, if it is still too early


class StalledState(NamedTuple):
    """
    What was found of an execution whose process may be stalled.

    Attributes:
        unrenewed: Seconds for which its lease had not been renewed, and which is renewed now.  0:
            the lease was not overdue.
        overdue_in: Seconds until the lease is overdue; 0: it was renewed, or there is none to
            renew.
        capped: Whether the lease is overdue, and is not renewed any more, as that is its cap.
    """

    unrenewed: float
    overdue_in: float
    capped: bool = False


def conflict_of(reply: Sequence[Any], locks: Sequence[str]) -> Conflict:
    """
    Parse a reply of acquire.lua that grants nothing: the lease that is in the way.

    Args:
        reply: The reply.
        locks: Names in Redis of the locks that were asked for.

    Raises:
        Replaced: The task must not run.
    """
    state, *answer = reply
    if state == REPLACED_BY:
        raise Replaced(decode(answer[-1]))
    nth, *lease = answer
    return Conflict.of(locks[nth], *lease)


def turns(reply: Sequence[Any]) -> list[Turn]:
    """Parse the parked tasks that have their turn."""
    return [
        Turn(decode(lock), decode(ticket), message, delay_ms / 1000)
        for lock, ticket, message, delay_ms in zip(*[iter(reply)] * 4, strict=True)
    ]


def renewed(replies: Sequence[Any]) -> bool | str | StoreError:
    """
    Combine the replies to the renewals of one lease's locks.

    Returns:
        False if a lock is no longer held; else the first error, if there is one; else the id of a
        newer task that waits for the lease to end, or True.
    """
    if 0 in replies:
        return False
    if error := next((reply for reply in replies if isinstance(reply, StoreError)), None):
        return error
    newer = next((reply for reply in replies if isinstance(reply, bytes)), None)
    return True if newer is None else task_id_of_reserved(decode(newer))


def looked(replies: Sequence[Any]) -> StalledState | StoreError:
    """Combine the replies about one execution's locks; the first error, if there is one."""
    error = next((reply for reply in replies if isinstance(reply, StoreError)), None)
    if error is not None:
        return error
    if b"capped" in replies:
        return StalledState(0.0, 0.0, capped=True)
    soon = min((-reply for reply in replies if reply < 0), default=0)
    return StalledState(max(0, *replies) / 1000, soon / 1000)
