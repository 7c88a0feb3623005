"""Read what is stored on a lock server, with limits: anybody who can publish has a part in it.

A holder describes itself in the record of its lease, for messages and tools, as a JSON object:

- ``task`` and ``id``, the task; or ``thread``, the name of the thread that holds the lock;
- ``worker``, the name of the worker; of a thread, its host;
- ``pid`` and ``host``, the process;
- ``timeout``, the seconds from a renewal to the end of the lease; missing if it is not renewed;
- ``parked``, set where nobody holds the lock: it is reserved for a parked task, which is ``id``, or
  for those in line;
- ``paused`` and ``note``, set where nobody holds the lock: an operator has paused it;
- ``unreadable``, in place of all others: the start of a description that cannot be read.

:func:`describe` makes the description, :func:`written` writes it, and :func:`holder_of` reads it.
"""

from __future__ import annotations

import json
import reprlib
from typing import TYPE_CHECKING, Any

from celery_dislock.config.terms import Rate
from celery_dislock.exceptions import EARLY, PAUSED
from celery_dislock.words import TEXT_MOST, plain, shortened

if TYPE_CHECKING:
    from collections.abc import Mapping

HOLDER_MOST = 16384  # bytes of a holder's description
NUMBER_MOST = 10.0**15

LEADER = "beat"  # the thread that leads several beats


#: Write a holder's description as it is stored.
written = json.JSONEncoder(separators=(",", ":")).encode


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
    task, task_id, worker, pid = (holder.get(name, "?") for name in ("task", "id", "worker", "pid"))
    if "unreadable" in holder:
        told = f"a holder whose record cannot be read: {holder['unreadable']}"
    elif "paused" in holder:
        told = f"{PAUSED} ({holder['note']})" if holder.get("note") else PAUSED
    elif "early" in holder:
        told = f"{EARLY}: {_why_early(holder)}"
    elif "parked" in holder:
        told = f"task {task_id}, whose turn it is" if "id" in holder else "the waiters in line"
    elif holder.get("thread") == LEADER:
        told = f"{LEADER} on {worker} (pid {pid})"
    else:
        who = f"thread {holder['thread']}" if "thread" in holder else f"{task}[{task_id}]"
        told = f"{who} on {worker} (pid {pid})"
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
    if (holder := parsed(written)) or written == b"{}":
        return {name: bounded(value) for name, value in holder.items()}
    return {"unreadable": reprlib.repr(text(written[:TEXT_MOST]))}


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


def text(written: bytes) -> str:
    """Decode a name from Redis, which may not be valid UTF-8."""
    return written.decode(errors="replace")


def parsed(written: bytes) -> dict[str, Any]:
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
        return shortened(value)
    if isinstance(value, (int, float)) and -NUMBER_MOST <= value <= NUMBER_MOST:  # NaN is not
        return value
    return None


def bounded_text(value: object) -> str | None:
    """Return a text, shortened; any other value is None."""
    return bounded(value) if isinstance(value, str) else None
