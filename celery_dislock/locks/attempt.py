"""Attempts to take a lock, conflicts, and the attempt of the running task body."""

from __future__ import annotations

import json
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from celery_dislock.exceptions import LockHeldError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from weakref import ref

    from celery_dislock.locks.callers import Caller
    from celery_dislock.locks.lease import Lease
    from celery_dislock.servers.reservations import Reservation

to_json = json.JSONEncoder(separators=(",", ":")).encode

current: ContextVar[Attempt | None] = ContextVar("dislock_attempt", default=None)


def current_lease() -> Lease | None:
    """Return the lease of the running task body; None if it has no lease."""
    attempt = current.get()
    return attempt.lease if attempt is not None else None


def in_words(holder: Mapping[str, Any]) -> str:
    """Describe a holder for a message: ``shop.export[<id>] on celery@w1 (pid 7)``."""
    if "unreadable" in holder:
        return f"a holder whose record cannot be read: {holder['unreadable']}"
    task, task_id, worker, pid = (holder.get(name, "?") for name in ("task", "id", "worker", "pid"))
    if "parked" in holder:
        return f"task {task_id}, whose turn it is" if "id" in holder else "the waiters in line"
    who = f"thread {holder['thread']}" if "thread" in holder else f"{task}[{task_id}]"
    return f"{who} on {worker} (pid {pid})"


class Attempt:
    """
    One attempt of one owner to take a lock, and the lease if it succeeded.

    The lease is stored here before the watchdog starts to renew it.  The code that made the attempt
    can therefore always end the lease, even if an exception is raised at any instruction.

    Args:
        owner: The string that identifies this acquisition.
        holder: Description of the owner for others: task, id, worker, pid.
        sender: Sender of the signals about this lock.
        caller: The thread or greenlet that must release the lock; if it ends first, the lease is
            no longer renewed.  None: the lock of a task, which always ends with its execution.

    Attributes:
        reservation: The reservation of the task's message, which the acquisition begins and the
            release may end.  None: the message has none, or one of another name than the lock's.
        has_begun: Whether the lock server was told of the reservation when it granted the lock.
        lease: The lease; None as long as there is none.
        holder_json: The holder as a JSON object; empty: made here.
    """

    __slots__ = (
        "caller",
        "has_begun",
        "holder",
        "holder_json",
        "lease",
        "owner",
        "reservation",
        "sender",
    )

    def __init__(
        self,
        owner: str,
        holder: Mapping[str, Any],
        sender: object = None,
        caller: ref[Caller] | None = None,
        holder_json: str = "",
    ) -> None:
        self.owner = owner
        self.holder = holder
        self.holder_json = holder_json or to_json(holder)
        self.sender = sender
        self.caller = caller
        self.reservation: Reservation | None = None
        self.has_begun = False
        self.lease: Lease | None = None

    def end(
        self,
        *,
        leaves: bool = False,
        at_least: float | None = None,
        ticket: str = "",
        settles: float = 0.0,
    ) -> None:
        """
        End the lease, if there is one; a second call does nothing.

        Args:
            leaves: True: leave the lease to expire instead of releasing it.
            at_least: See :meth:`celery_dislock.locks.lease.Lease.release`.
            ticket: See :meth:`celery_dislock.locks.lease.Lease.release`.
            settles: See :meth:`celery_dislock.locks.lease.Lease.release`.
        """
        if self.lease is not None:
            end = self.lease.leave if leaves else self.lease.release
            end(at_least=at_least, ticket=ticket, settles=settles)


class Conflict(NamedTuple):
    """
    An acquisition that was refused because the lock is held; falsy, unlike a lease.

    Attributes:
        key: The key of the lock; of several, of the one that is held.
        holder: Who holds it: ``task``, ``id``, ``worker`` and ``pid``; in plain Python ``thread``
            in place of ``task`` and ``id``.
        remaining: Seconds until the holder's lease ends, unless it is renewed.
        place: Place in line, from 1, that the task would get if it were parked; else 0.
    """

    key: str
    holder: Mapping[str, Any]
    remaining: float
    place: int = 0

    def __bool__(self) -> bool:
        return False

    def error(self) -> LockHeldError:
        """Make the LockHeldError for this conflict."""
        return LockHeldError(self.key, in_words(self.holder), self.remaining)
