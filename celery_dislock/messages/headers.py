"""The notes in a message's header, which record how its task has waited for its lock.

All notes are in one header of the message, ``dislock``, whose value is a dict with a version.  The
header is read from the message's own headers, in this module only.  ``request.headers`` will not
do: Celery replaces that by a header of the name "headers", which other libraries add.

Anybody who can publish a message can forge a note.  A note that this package would not have written
is ignored.  A valid note is about the message's own task, so a forged note can do no more harm than
a forged message.

A header of a later version is kept and sent on.  The members below have the same meaning in all
versions, since each of them keeps a promise: that the newest message runs last, that a key is free
when its task has ended, that a wait has an end.  Members that are not known are ignored.  A task
with its turn, or with a lease to take over, of a later version is put off until a worker of that
version gets it.

Most notes are dropped as soon as the lock is taken.  Celery copies a task's headers into its
retries and replacements, and those start a wait of their own.
"""

from __future__ import annotations

import logging
import re
import reprlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from celery_dislock.config.options import UNIQUE_UNTIL
from celery_dislock.keys.names import (
    is_of_one,
    owners_start,
    reserved_name,
    task_name,
    ticket_of_request,
)
from celery_dislock.servers.reservations import Reservation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from celery.app.task import Context

    from celery_dislock.exceptions import StoreError

HEADER = "dislock"
VERSION = 1  # of the header, in its member "v"

# Members of the header.  These two belong to the message, and retries keep them.
SENT = "sent"  # UNIX time in microseconds at which a task was sent that a newer one may replace
UNIQUE = "unique"  # lock, until, mark and number of the message's Reservation; then what is new
# The others are notes of one delivery.
PUT_OFF = "put_off"  # times this task was put off in a row
RETRY_UNTIL = "retry_until"  # UNIX time at which lock_on_conflict="retry" gives up
HELD = "held"  # owner whose leases this delivery takes over, and the names of their locks
GIVEN_UP = "given_up"  # owners that got no reply, and may hold the lock
TICKET = "ticket"  # lock and ticket of a parked task that has its turn, or may be in line
REPLACED = "replaced"  # why a parked task lost its place in line
SINCE = "since"  # UNIX time at which the task first asked for its lock in vain, for metrics
LATER = "later"  # UNIX time since which the task waits for a worker of a later release

# Headers that RabbitMQ adds to a message which it dead-letters, or delivers again.
OF_THE_BROKER = (
    "x-death",
    "x-first-death-",
    "x-last-death-",
    "x-delivery-count",
    "x-acquired-count",
)

SKEW = 60.0  # seconds by which a worker's clock may be behind that of a sender
PUT_OFF_MOST_TIMES = 10**6  # the count stops here
UNTIL_MOST = 10.0**11  # UNIX time, about the year 5138
OWNER_MOST = 400  # characters of an owner after the task's id: worker, process and count
OWNERS_MOST = 8  # owners in a note; older ones were released before
REASON_MOST = 1000  # characters
LOCK_MOST = 1000  # characters of a lock's name, with its prefix
LOCKS_MOST = 1000  # locks whose leases a delivery takes over
ID_MOST = 1000  # characters of a task's id in a reservation
MESSAGES_MOST = 10**12  # maximum number of a message, of those of one key that replace each other
MARK = re.compile("[0-9a-f]{1,32}|-")
SURROGATE = re.compile("[\ud800-\udfff]")

logger = logging.getLogger("celery_dislock")


@dataclass
class Notes:
    """
    The notes of one delivery, updated while it is handled and written into the next message.

    Attributes:
        put_off: Times the task was put off in a row.
        retry_until: UNIX time at which ``lock_on_conflict="retry"`` gives up; None if not set.
        held: Owner whose leases this delivery takes over, and the names of their locks; or whose
            place in line.
        given_up: Owners of this task that got no reply from the lock server, and may hold the lock.
        parked: Lock and ticket of a parked task that has its turn, see :func:`own_turn`; or of a
            task that may be in line, since its parking got no reply.
        replaced: Why the task lost its place in line.
        since: UNIX time at which the task first asked for its lock in vain; None if nobody
            measures it.
        later: UNIX time since which the task waits for a worker of a later release; None: it does
            not.
        is_later: Whether a later version has written the header.
        came: Whether the message has our header; most have none.
        unique: The message's reservation, unchecked; see :func:`reservation_of`.  None: it has
            none.
        unasked: Why the lock server could not say whether it knows *parked*, which decides which
            lock the task takes.  None: it has, or was not asked.
        sent: UNIX time in microseconds at which the task was sent, for "cancel".  0: the task
            cancels nobody.
    """

    put_off: int = 0
    retry_until: float | None = None
    held: list[str] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)
    parked: tuple[str, str] | None = None
    replaced: str | None = None
    since: float | None = None
    later: float | None = None
    is_later: bool = False
    came: bool = False
    unique: Any = None
    unasked: StoreError | None = None
    sent: int = 0

    @classmethod
    def of(cls, request: Context) -> Notes:
        """Read the notes of a delivery; invalid notes are ignored, with one warning for all."""
        notes, given = cls(), _header_of(request)
        if given is None:
            return notes
        notes.came = True
        notes.is_later = _version(given) > VERSION
        ignored = [] if _version(given) else [f"{HEADER}={reprlib.repr(given)}"]
        members = _members(given)
        notes.unique = members.get(UNIQUE)
        for name, (attribute, read) in READERS.items():
            note = members.get(name)
            if note is None:
                continue
            value = read(note, str(request.id))
            if value is None:
                ignored.append(f"{name}={reprlib.repr(note)}")
            else:
                setattr(notes, attribute, value)
        if notes.parked and notes.parked[1] != ticket_of_request(request):
            notes.parked = None
        if ignored:
            #: WARNING: A body has copied `request.headers` into another task, or somebody has
            #: forged the notes. -> If no body copies headers, find out who can publish.
            logger.warning(
                "Task %s[%s] has notes in its header 'dislock' that celery-dislock did not write "
                "for it; they are ignored: %s",
                *(getattr(request, "task", "?"), request.id, ", ".join(ignored)),
            )
        return notes

    def to_header(self) -> dict[str, Any]:
        """Return the members of the header that pass these notes on to the next message."""
        noted = {name: getattr(self, attribute) for name, (attribute, _) in READERS.items()}
        noted |= {TICKET: list(self.parked or ()), SENT: self.sent}  # AMQP has no tuples
        return {name: note for name, note in noted.items() if note}


NO_NOTES = Notes()


def _header_of(request: Context) -> Any:
    """Return our header of a request's message, which may be any value; None if there is none.

    A worker makes a request of all headers of its message.  An eager task has no message: its
    headers are what its caller has given.
    """
    about = vars(request)
    headers = about.get("headers") if about.get("is_eager") else about
    return headers.get(HEADER) if isinstance(headers, dict) else None


def _version(given: Any) -> int:
    """Return the version of a header; 0 if no version of this package has written it."""
    version = given.get("v") if isinstance(given, dict) else 0
    return version if type(version) is int and version > 0 else 0


def _members(given: Any) -> Mapping[str, Any]:
    return given if _version(given) else {}


def notes_of(request: Context) -> Mapping[str, Any]:
    """Return the members of the header of a request's message, unchecked; none if it has none."""
    return _members(_header_of(request))


def for_scripts(headers: Mapping[str, Any]) -> tuple[int, str]:
    """
    Return what a script has to know of a message that is parked.

    Returns:
        When it was sent, in microseconds, by its sender's clock; 0: it does not say so.  And
        ``lock_unique_until`` of its reservation; empty: it has none.
    """
    given = headers.get(HEADER)
    members = given if isinstance(given, dict) else {}
    sent, unique = members.get(SENT), members.get(UNIQUE)
    is_time = type(sent) is int and 0 < sent < UNTIL_MOST * 1e6
    until = unique[1] if isinstance(unique, (list, tuple)) and len(unique) > 1 else ""
    return int(sent or 0) if is_time else 0, until if until in UNIQUE_UNTIL else ""


def sent_of(request: Context) -> int:
    """
    Return when a task was sent, as its message says; now, if that is not said, or much later.

    What is a little later may be right, as this worker's clock may be behind: the lock server takes
    it for no later than now.
    """
    sent, now = notes_of(request).get(SENT), int(time.time() * 1e6)
    return sent if type(sent) is int and 0 < sent < now + SKEW * 1e6 else now


def notes_in(headers: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the members of the header among a message's headers, as :func:`notes_of` does."""
    return _members((headers or {}).get(HEADER))


def with_notes(headers: Mapping[str, Any] | None, notes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message's headers with more notes; a header of a later version stays one."""
    own = dict(headers or {})
    if notes:
        given = _members(own[HEADER]) if HEADER in own else {}
        own[HEADER] = {"v": VERSION, **given, **notes}
    return own


def as_sent(headers: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a message's headers without the notes of one delivery, and without the broker's."""
    given = headers or {}
    own = {name: value for name, value in given.items() if not str(name).startswith(OF_THE_BROKER)}
    if HEADER not in own:
        return own
    kept = {name: value for name, value in _members(own.pop(HEADER)).items() if name not in READERS}
    return {**own, HEADER: kept} if len(kept) > 1 else own  # more than the version


def own_turn(request: Context, prefix: str) -> tuple[str, str] | None:
    """
    Return the lock and the ticket of the turn that a delivery's message brings; None if none.

    A turn of another ticket of the same task does not count.  Celery copies headers into a retry,
    and a retry is new work with a ticket of its own.

    Args:
        request: Celery's request of the delivery.
        prefix: Prefix of the locks' names in Redis: ``dislock_prefix``.
    """
    given = notes_of(request).get(TICKET)
    turn = None if given is None else _ticket(given, str(request.id))
    if turn is None or turn[1] != ticket_of_request(request) or not is_under(prefix, turn[0]):
        return None
    return turn


def reservation_of(
    request: Context, prefix: str, ttl: float = 0.0, ttl_of_several: float = 0.0
) -> Reservation | None:
    """
    Return the reservation of a delivery's message; None if it has none, or one that is not ours.

    The server compares reservations by the task's id, so a forged one can do no more than end the
    reservation of its own task.

    Args:
        request: Celery's request of the delivery.
        prefix: Prefix of the locks' names in Redis: ``dislock_prefix``.
        ttl: See :class:`celery_dislock.servers.reservations.Reservation`.
        ttl_of_several: The same of a task with several keys, which the watchdog does not renew.
    """
    given = notes_of(request).get(UNIQUE)
    if not isinstance(given, (list, tuple)) or len(given) in {0, 1, 3}:
        return None
    lock, until, mark, number = (*given, "-", 0)[:4]  # a message without a number is not replaced
    if not (_is_text(lock, LOCK_MOST) and is_under(prefix, lock)):
        return None
    if until not in UNIQUE_UNTIL or not (isinstance(mark, str) and MARK.fullmatch(mark)):
        return None
    if type(number) is not int or not 0 <= number <= MESSAGES_MOST:
        return None
    encoded_id = reserved_name(request.id)
    if len(encoded_id) > ID_MOST:
        return None
    kept = ttl if is_of_one(lock) else ttl_of_several
    return Reservation(lock, encoded_id, until, kept, mark, number)


def with_reservation(headers: Any, reservation: Reservation) -> dict[str, Any]:
    """Return a message's headers with its reservation."""
    return with_notes(
        headers,
        {UNIQUE: [reservation.lock, reservation.until, reservation.mark, reservation.number]},
    )


def forget_notes(request: Context) -> None:
    """Remove the notes of a delivery that has its lock: Celery would copy them into a retry."""
    about = vars(request)
    for headers in (about, about.get("headers")):
        if isinstance(headers, dict) and HEADER in headers:
            kept = as_sent({HEADER: headers.pop(HEADER)})
            headers.update(kept)


def _is_text(given: object, most: int) -> bool:
    """Tell whether a note is text that can be sent to Redis; JSON may contain surrogates."""
    return isinstance(given, str) and len(given) <= most and not SURROGATE.search(given)


def is_under(prefix: str, lock: str) -> bool:
    """Tell whether a lock's name in Redis has this prefix."""
    return lock.startswith(f"{prefix}:{{")


def _times(given: Any, _task_id: str) -> int | None:
    return given if type(given) is int and 0 <= given <= PUT_OFF_MOST_TIMES else None


def _time(given: Any, _task_id: str) -> float | None:
    is_number = type(given) in {int, float}
    return float(given) if is_number and 0 < given < UNTIL_MOST else None


def _owner(given: Any, task_id: str) -> str | None:
    start = owners_start(task_id)
    is_own = _is_text(given, len(start) + OWNER_MOST) and given.startswith(start)
    return str(given) if is_own else None


def _owners(given: Any, task_id: str) -> list[str] | None:
    if not isinstance(given, (list, tuple)) or len(given) > OWNERS_MOST:
        return None
    owners = [_owner(owner, task_id) for owner in given]
    return None if None in owners else [owner for owner in owners if owner]


def _held(given: Any, task_id: str) -> list[str] | None:
    if not isinstance(given, (list, tuple)) or not 1 < len(given) <= 1 + LOCKS_MOST:
        return None
    owner, *locks = given
    is_own = _owner(owner, task_id) and all(_is_text(lock, LOCK_MOST) for lock in locks)
    return [owner, *locks] if is_own else None


def _ticket(given: Any, task_id: str) -> tuple[str, str] | None:
    if not isinstance(given, (list, tuple)) or len(given) != 2:  # noqa: PLR2004 -- a pair
        return None
    lock, ticket = given
    if not _is_text(lock, LOCK_MOST) or not isinstance(ticket, str):
        return None
    is_lock = re.fullmatch(r"[^{}]+:\{[^{}]+\}", lock)
    numbers = ticket.removeprefix(task_name(task_id))
    is_own = len(numbers) < len(ticket) and re.fullmatch(r"(:[0-9]{1,10}){2}", numbers)
    return (lock, ticket) if is_lock and is_own else None


def readable_reason(given: object, _task_id: str = "") -> str | None:
    """Return a reason from a message if it can be shown; else None."""
    is_text = isinstance(given, str) and 0 < len(given) <= REASON_MOST and given.isprintable()
    return str(given) if is_text else None


# For each note of one delivery, the attribute of Notes and the function that reads the note.  The
# function gets the note and the task's id.  It returns the value, or None if the note is not valid.
READERS: dict[str, tuple[str, Callable[[Any, str], Any]]] = {
    PUT_OFF: ("put_off", _times),
    RETRY_UNTIL: ("retry_until", _time),
    HELD: ("held", _held),
    GIVEN_UP: ("given_up", _owners),
    TICKET: ("parked", _ticket),
    REPLACED: ("replaced", readable_reason),
    SINCE: ("since", _time),
    LATER: ("later", _time),
}
