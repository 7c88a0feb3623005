"""The notes in a message's headers: what its task has met while it waited for its lock.

Anybody who can publish a message can write them.  So they are read here and nowhere else, once for
each delivery, and a note that this package would not have written is ignored.  What is left is
about the message's own task: a forged note does no more than a forged message can do anyway.

A note ends as soon as the lock is had: Celery copies the headers of a task into its retries and
replacements, and what those meet is a wait of its own.
"""

from __future__ import annotations

import logging
import math
import re
import reprlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from celery_dislock.keys.names import owners_start, task_name, ticket_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery.app.task import Context

PUT_OFF_HEADER = "dislock_put_off"  # times this task was put off in a row
RETRY_UNTIL_HEADER = "dislock_retry_until"  # UNIX time at which lock_on_conflict="retry" gives up
HELD_HEADER = "dislock_held"  # owner that has left its lease to this delivery
GIVEN_UP_HEADER = "dislock_given_up"  # owners that asked in vain, and may be granted the lock
TICKET_HEADER = "dislock_ticket"  # lock and ticket of a parked task whose turn it is
REPLACED_HEADER = "dislock_replaced"  # why a parked task lost its place in line

PUT_OFF_MOST_TIMES = 10**6  # counted; beyond it stays as it is
UNTIL_MOST = 10.0**11  # seconds since 1970: three thousand years
OWNER_MOST = 400  # characters after the task's id: worker, process and count
OWNERS_MOST = 8  # that asked in vain: the server has answered about any before these
REASON_MOST = 1000  # characters
LOCK_MOST = 1000  # characters of a lock's name, with its prefix

logger = logging.getLogger("celery_dislock")


@dataclass
class Notes:
    """
    What is noted about one delivery; changed as it goes, and written into the next message.

    Attributes:
        put_off: Times the task was put off in a row.
        retry_until: UNIX time at which ``lock_on_conflict="retry"`` gives up; None: not noted yet.
        held_by: Owner that has left its lease to this delivery.
        given_up: Owners of this task that asked in vain, and may be granted the lock.
        parked: Lock and ticket of a parked task whose turn it is.
        replaced: Why the task lost its place in line.
    """

    put_off: int = 0
    retry_until: float | None = None
    held_by: str | None = None
    given_up: list[str] = field(default_factory=list)
    parked: tuple[str, str] | None = None
    replaced: str | None = None

    @classmethod
    def of(cls, request: Context, prefix: str) -> Notes:
        """
        Read the notes of a delivery; what is none is ignored, with one warning.

        Args:
            request: The delivery.
            prefix: Of the locks' names in Redis: ``dislock_prefix``.
        """
        notes = cls()
        headers = request.headers
        if not headers or not isinstance(headers, dict):
            return notes
        ignored = []
        for header, (attribute, read) in READERS.items():
            given = headers.get(header)
            if given is None:
                continue
            value = read(given, str(request.id), prefix)
            if value is None:
                ignored.append(f"{header}={reprlib.repr(given)}")
            else:
                setattr(notes, attribute, value)
        if ignored:
            logger.warning(
                "Task %s[%s] has headers that celery-dislock did not write for it; they are "
                "ignored: %s",
                *(getattr(request, "task", "?"), request.id, ", ".join(ignored)),
            )
        return notes

    def to_headers(self) -> dict[str, Any]:
        """Return the headers of a message that carries them on."""
        noted = {
            PUT_OFF_HEADER: self.put_off,
            RETRY_UNTIL_HEADER: self.retry_until,
            HELD_HEADER: self.held_by,
            GIVEN_UP_HEADER: self.given_up,
            TICKET_HEADER: list(self.parked or ()),
            REPLACED_HEADER: self.replaced,
        }
        return {header: note for header, note in noted.items() if note}


def own_turn(request: Context, prefix: str) -> tuple[str, str] | None:
    """
    Return lock and ticket of a delivery whose message says that it is its turn there.

    None, too, where its turn was another one's of the same task: what that has retried is new work.

    Args:
        request: The delivery.
        prefix: Of the locks' names in Redis: ``dislock_prefix``.
    """
    headers = request.headers
    given = headers.get(TICKET_HEADER) if isinstance(headers, dict) else None
    turn = None if given is None else _ticket(given, str(request.id), prefix)
    own = ticket_name(request.id, request.retries, request.replaced_task_nesting)
    return turn if turn is not None and turn[1] == own else None


def forget_notes(request: Context) -> None:
    """Take the notes off a request, so that Celery does not copy them into what follows."""
    if request.headers:
        for header in READERS:
            request.headers.pop(header, None)


def _times(given: Any, _task_id: str, _prefix: str) -> int | None:
    return given if type(given) is int and 0 <= given <= PUT_OFF_MOST_TIMES else None


def _time(given: Any, _task_id: str, _prefix: str) -> float | None:
    is_number = type(given) in {int, float} and math.isfinite(given)
    return float(given) if is_number and 0 < given < UNTIL_MOST else None


def _owner(given: Any, task_id: str, _prefix: str) -> str | None:
    if not isinstance(given, str):
        return None
    start = owners_start(task_id)
    return given if given.startswith(start) and len(given) - len(start) <= OWNER_MOST else None


def _owners(given: Any, task_id: str, prefix: str) -> list[str] | None:
    if not isinstance(given, (list, tuple)) or len(given) > OWNERS_MOST:
        return None
    owners = [_owner(one, task_id, prefix) for one in given]
    return None if None in owners else [one for one in owners if one]


def _ticket(given: Any, task_id: str, prefix: str) -> tuple[str, str] | None:
    if not isinstance(given, (list, tuple)) or len(given) != 2:  # noqa: PLR2004 -- a pair
        return None
    lock, ticket = given
    if not isinstance(lock, str) or not isinstance(ticket, str) or len(lock) > LOCK_MOST:
        return None
    is_lock = re.fullmatch(re.escape(prefix) + r":\{[^{}]+\}", lock)
    numbers = ticket.removeprefix(task_name(task_id))
    is_own = len(numbers) < len(ticket) and re.fullmatch(r"(:[0-9]{1,10}){2}", numbers)
    return (lock, ticket) if is_lock and is_own else None


def _reason(given: Any, _task_id: str, _prefix: str) -> str | None:
    is_text = isinstance(given, str) and 0 < len(given) <= REASON_MOST and given.isprintable()
    return given if is_text else None


# Where each note is kept, and how it is read: given what the header says, the task's id and the
# prefix of locks, it returns the note, or None where it is none.
READERS: dict[str, tuple[str, Callable[[Any, str, str], Any]]] = {
    PUT_OFF_HEADER: ("put_off", _times),
    RETRY_UNTIL_HEADER: ("retry_until", _time),
    HELD_HEADER: ("held_by", _owner),
    GIVEN_UP_HEADER: ("given_up", _owners),
    TICKET_HEADER: ("parked", _ticket),
    REPLACED_HEADER: ("replaced", _reason),
}
