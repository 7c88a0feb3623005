"""Attempts to take a lock, conflicts, and the attempt of the running task body."""

from __future__ import annotations

import json
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from celery_dislock.exceptions import LockHeldError
from celery_dislock.servers.records import in_words
from celery_dislock.servers.requests import RELEASED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from celery_dislock.locks.lease import Lease
    from celery_dislock.servers.requests import Ending
    from celery_dislock.servers.reservations import Reservation

AT_ONCE, WAITED, PARKED, PUT_OFF = "at_once", "waited", "parked", "put_off"  # Attempt.how

to_json = json.JSONEncoder(separators=(",", ":")).encode

current: ContextVar[Attempt | None] = ContextVar("dislock_attempt", default=None)


def current_lease() -> Lease | None:
    """Return the lease of the running task body; None if it has no lease."""
    attempt = current.get()
    return attempt.lease if attempt is not None else None


@dataclass(slots=True, eq=False)
class Attempt:
    """
    One attempt of one owner to take a lock, and the lease if it succeeded.

    The lease is stored here before the watchdog starts to renew it.  The code that made the attempt
    can therefore always end the lease, even if an exception is raised at any instruction.

    Args:
        owner: The string that identifies this acquisition.
        holder: Description of the owner for others: task, id, worker, pid.
        sender: Sender of the signals about this lock.

    Attributes:
        reservation: The reservation of the task's message, which the acquisition begins and the
            release may end.  None: the message has none, or one of another name than the lock's.
        has_begun: Whether the lock server was told of the reservation when it granted the lock.
        lease: The lease; None as long as there is none.
        holder_json: The holder as a JSON object; empty: made here.
        how: How the lock was got, for metrics: "at_once", "waited", "parked" or "put_off".
        asked_at: Time of the first request, on this process's clock; None before it.
        waited: Seconds waited before that: in line, or put off.
        trace: What a watcher keeps with the attempt and its lease.
    """

    owner: str
    holder: Mapping[str, Any]
    sender: object = None
    holder_json: str = ""
    reservation: Reservation | None = None
    has_begun: bool = False
    lease: Lease | None = None
    how: str = AT_ONCE
    asked_at: float | None = None
    waited: float = 0.0
    trace: Any = None

    def __post_init__(self) -> None:
        self.holder_json = self.holder_json or to_json(self.holder)

    def end(self, ending: Ending = RELEASED) -> None:
        """End the lease, if there is one; a second call does nothing."""
        if self.lease is not None:
            self.lease.release(ending)


@dataclass(frozen=True)
class Conflict:
    """
    An acquisition that was refused because the lock is held; falsy, unlike a lease.

    Attributes:
        key: The key of the lock; of several, of the one that is held.
        holder: Who holds it: ``task``, ``id``, ``worker`` and ``pid``; in plain Python ``thread``
            in place of ``task`` and ``id``.
        remaining: Seconds until the holder's lease ends, unless it is renewed.
        place: Place in line, from 1, that the task would get if it were parked; else 0.
        held_for: Seconds since the holder took the lock, by the lock server's clock; None if that
            is not known.
        renewed: Seconds since the holder's lease was renewed, or taken if it was not renewed since;
            None if that is not known, or the lease has a fixed expiry.
    """

    key: str
    holder: Mapping[str, Any]
    remaining: float
    place: int = 0
    held_for: float | None = None
    renewed: float | None = None

    def __bool__(self) -> Literal[False]:
        return False

    def error(self, hint: str = "") -> LockHeldError:
        """Make the LockHeldError for this conflict; *hint*: why the caller may wait for itself."""
        holder = in_words(self.holder)
        return LockHeldError(self.key, holder, self.remaining, self.held_for, self.renewed, hint)
