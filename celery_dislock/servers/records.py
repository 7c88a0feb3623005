"""Read what is stored on a lock server, with limits: anybody who can publish has a part in it.

A lease that is in the way of an acquisition is read as a :class:`Conflict`.

A holder describes itself in the record of its lease, for messages and tools, as a JSON object:

- ``task`` and ``id``, the task; or ``thread``, the name of the thread that holds the lock;
- ``worker``, the name of the worker; of a thread, its host;
- ``pid`` and ``host``, the process;
- ``timeout``, the seconds from a renewal to the end of the lease; missing if it is not renewed;
- ``parked``, set where nobody holds the lock: it is reserved for a parked task, which is ``id``, or
  for those in line; ``waits`` is the lock that this task waits for meanwhile;
- ``paused`` and ``note``, set where nobody holds the lock: an operator has paused it;
- ``unreadable``, in place of all others: the start of a description that cannot be read.

:func:`describe` makes the description, :func:`write_holder` writes it, :func:`holder_of` reads it.
"""

from __future__ import annotations

import json
import reprlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from celery_dislock.config.terms import Rate
from celery_dislock.exceptions import PAUSED, TOO_EARLY, LockHeldError
from celery_dislock.keys.templates import key_of
from celery_dislock.words import TEXT_MOST, plain, time_of_day

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

HOLDER_MOST = 16384  # bytes of a holder's description
NUMBER_MOST = 10.0**15

LEADER = "beat"  # the thread that leads several beats


@dataclass(frozen=True)
class Conflict:
    """
    An acquisition that was refused because the lock is held; falsy, unlike a lease.

    Attributes:
        key: The key of the lock; of several locks, the key of the one that is held.
        holder: Who holds it: ``task``, ``id``, ``worker`` and ``pid``; in plain Python ``thread``
            in place of ``task`` and ``id``.
        remaining: Seconds until the holder's lease ends, unless it is renewed.  Of several leases,
            this is the one that ends first.
        place: Place in line, from 1, that the task would get if it were parked; else 0.
        held_for: Seconds since the holder took the lock, by the lock server's clock; None if that
            is not known.
        renewed: Seconds since the holder's lease was renewed, or taken if it was not renewed since;
            None if that is not known, or the lease has a fixed expiry.
        owner: The string that identifies the holder's acquisition.
        is_copy: Whether the holder is another delivery of the task that asks, or its own turn.
    """

    key: str
    holder: Mapping[str, Any]
    remaining: float
    place: int = 0
    # For messages: conflicts that differ in nothing else are equal.
    held_for: float | None = field(default=None, compare=False)
    renewed: float | None = field(default=None, compare=False)
    owner: str = ""
    is_copy: bool = field(default=False, compare=False)

    @classmethod
    def of(
        cls,
        lock: str,
        remaining_ms: int,
        owner: bytes,
        holder: bytes,
        held_ms: int = -1,
        is_copy: int = 0,
        **more: Any,
    ) -> Self:
        """Parse the lease in the way, as a script tells it of this lock; with *more* attributes."""
        remaining, who = remaining_ms / 1000, holder_of(holder)
        if held_ms >= 0:  # less: not known, or the server's clock was set back
            more["held_for"] = held_for = held_ms / 1000
            if not owner.startswith(b"~"):
                more["renewed"] = renewed_ago(who, remaining, held_for)
        more |= {"owner": decode(owner).removeprefix("~"), "is_copy": bool(is_copy)}
        return cls(key_of(lock), who, remaining, **more)

    def __bool__(self) -> Literal[False]:
        return False

    @property
    def early(self) -> bool:
        """Whether it is only too early; *remaining* is then the time until the next start."""
        return "early" in self.holder

    def error(self, hint: str = "") -> LockHeldError:
        """Make the LockHeldError for this conflict; *hint*: why the caller may wait for itself."""
        holder = in_words(self.holder)
        if self.early:  # the text is read later, and elsewhere
            start = time.time() + self.remaining
            holder = f"{holder}, the next may start at {time_of_day(start)}"
        about = {
            "holder": dict(self.holder),
            "place": self.place,
            "owner": self.owner,
            "is_copy": self.is_copy,
        }
        times = self.remaining, self.held_for, self.renewed
        return LockHeldError(self.key, holder, *times, hint, about)


LockHeldError.conflict_type = Conflict


#: Write a holder's description as it is stored.
write_holder = json.JSONEncoder(separators=(",", ":")).encode


def describe(
    who: Mapping[str, Any], worker: str | None, pid: int, timeout: float | None
) -> dict[str, Any]:
    """
    Make the description of a holder.

    Args:
        who: The task, its id and its host; or the thread.
        worker: Name of the worker; of a thread, its host.
        pid: The process.
        timeout: Seconds from a renewal to the end of the lease; None: it is not renewed.
    """
    holder = {**who, "worker": worker, "pid": pid}
    if timeout is not None:
        holder["timeout"] = timeout
    return holder


def in_words(holder: Mapping[str, Any]) -> str:
    """Describe a holder for a message: ``shop.export[<id>] on celery@w1 (pid 7)``."""
    task_id = holder.get("id", "?")
    on = f"on {holder.get('worker', '?')} (pid {holder.get('pid', '?')})"
    if "unreadable" in holder:
        told = f"a holder whose record cannot be read: {holder['unreadable']}"
    elif "paused" in holder:
        told = f"{PAUSED} ({holder['note']})" if holder.get("note") else PAUSED
    elif "early" in holder:
        told = f"{TOO_EARLY}: {_why_early(holder)}"
    elif isinstance(holder.get("waits"), str):
        told = f"task {task_id}, which waits for lock {key_of(holder['waits'])!r}"
    elif "parked" in holder:
        told = f"task {task_id}, whose turn it is" if "id" in holder else "the waiters in line"
    elif holder.get("thread") == LEADER:
        told = f"{LEADER} {on}"
    elif "thread" in holder:
        told = f"thread {holder['thread']} {on}"
    else:
        told = f"{holder.get('task', '?')}[{task_id}] {on}"
    return plain(told)


def _why_early(holder: Mapping[str, Any]) -> str:
    """Say why a lock cannot be taken yet: it is held back, or its rate does not admit it."""
    if holder.get("held_back"):
        return f"held back ({holder['note']})" if holder.get("note") else "held back"
    most, window = holder.get("most"), holder.get("window_ms")
    if isinstance(most, (int, float)) and isinstance(window, (int, float)):
        return str(Rate(int(most), window / 1000))
    return "its rate"


def is_turn(holder: Mapping[str, Any]) -> bool:
    """Tell whether a lock is reserved for a parked task, whose message is on its way."""
    return "parked" in holder and "id" in holder and "early" not in holder


def holder_of(written: bytes) -> dict[str, Any]:
    """Parse a description, each value bounded; text that is no JSON object is shown."""
    if (holder := parse_object(written)) or written == b"{}":
        return {name: bounded(value) for name, value in holder.items()}
    return {"unreadable": reprlib.repr(decode(written[:TEXT_MOST]))}


def renewed_ago(holder: Mapping[str, Any], remaining: float, held_for: float) -> float | None:
    """
    Return the seconds since a lease was renewed, or taken if it was not renewed since.

    A lease that was handed to a waiter ends earlier than after its timeout until it is renewed.

    Returns:
        None if the holder does not say for how long a renewal lasts: its lease is not renewed, or
        its version did not write that.
    """
    timeout = holder.get("timeout")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        return None
    return min(max(0.0, timeout - remaining), held_for)


def station_locks(stations: bytes) -> list[str]:
    """Return the locks in a parked task's record; empty if the task has only one lock."""
    try:
        return [str(name) for name, *_ in json.loads(stations)]
    except (ValueError, TypeError, RecursionError):
        return []


def decode(written: bytes) -> str:
    """Decode a name from Redis, which may not be valid UTF-8."""
    return written.decode(errors="replace")


def parse_object(written: bytes) -> dict[str, Any]:
    """Parse a JSON object of limited size; empty if it is none."""
    if len(written) > HOLDER_MOST:
        return {}
    try:
        found = json.loads(written)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def bounded(value: object) -> Any:
    """Return a text, shortened, a number in range or a boolean as it is; any other is None."""
    if isinstance(value, str):
        return value if len(value) <= TEXT_MOST else f"{value[:TEXT_MOST]}..."
    if isinstance(value, (int, float)) and -NUMBER_MOST <= value <= NUMBER_MOST:  # NaN is not
        return value
    return None


def bounded_text(value: object) -> str | None:
    """Return a text, shortened; any other value is None."""
    return bounded(value) if isinstance(value, str) else None
