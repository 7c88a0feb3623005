"""The names of the Redis keys that the scripts use.

Each key of a lock begins with the lock's name, and ends with one of the endings in ``_names.lua``.
The endings are read from that file, so Python and the scripts use the same names.
"""

from __future__ import annotations

import re

from celery_dislock.scripts.files import read_lua

_ENDING = re.compile(r"^local ([A-Z]+) = '(:.*?)' +-- (\w+)", re.MULTILINE)

_FOUND = _ENDING.findall(read_lua("_names"))
_ENDS = {name: end for name, end, _ in _FOUND}
UNIQUE = _ENDS["UNIQUE"]  # ends the name of a lock's reservation
PLACES, TICKETS, RUNNING = _ENDS["PLACES"], _ENDS["TICKETS"], _ENDS["RUNNING"]
REPLACED, ASIDE = _ENDS["REPLACED"], _ENDS["ASIDE"]
DONE, UNSENT = _ENDS["DONE"], _ENDS["UNSENT"]  # before a ticket or an owner, and a task's id

# Redis type of each key that exists at most once per lock, by the ending after the lock's name.
KEY_TYPES = {"": "hash"} | {end: kind for _, end, kind in _FOUND if end[-1].isalpha()}


def wake_list(lock: str, owner: str) -> str:
    """Name the list through which a waiting owner is woken."""
    return f"{lock}{_ENDS['WAKE']}{owner}"


def mark_of(lock: str, task_id: str) -> str:
    """Name the key of a task's mark beside the lock."""
    return f"{lock}{_ENDS['MARK']}{task_id}"


def done_of(lock: str, name: str) -> str:
    """Name the mark of a parked task's ticket, or of a delivery, that is done."""
    return f"{lock}{DONE}{name}"


def crashes_of(lock: str, ticket: str) -> str:
    """Name the hash that counts how often the process of a delivery has died."""
    return f"{lock}{_ENDS['CRASHES']}{ticket}"


def beat_of(lock: str) -> str:
    """Name the hash of when the entries of beat's schedule were last sent."""
    return f"{lock}{_ENDS['BEAT']}"


def aside_of(lock: str) -> str:
    """Name the hash of a lock's parked tasks that were set aside."""
    return f"{lock}{ASIDE}"


def index_of_lines(prefix: str, broker: str) -> str:
    """Name the index of the locks that have parked tasks of one broker."""
    return f"{prefix}:lines:{broker}"


def sweep_lock(prefix: str, broker: str) -> str:
    """Name the lock under which one worker at a time sweeps the lines of one broker."""
    return f"{prefix}:sweep:{{{broker}}}"


def epoch_of(prefix: str, broker: str) -> str:
    """Name the record by which workers know that the lock server has lost the lines of a broker."""
    return f"{prefix}:epoch:{broker}"


def index_of_counts(prefix: str, tag: str = "counts") -> str:
    """Name the index of the workers that have counted something, for metrics."""
    return f"{prefix}:metrics:{{{tag}}}"


def counts_of(prefix: str, worker: str) -> str:
    """Name the hash of what a worker has counted; in the slot of the index."""
    return f"{index_of_counts(prefix)}:of:{worker}"


_OF_A_LOCK = re.compile(
    rf"(.*?:\{{[^}}]*\}}(?::and:[0-9a-f]+)?)({'|'.join(sorted(KEY_TYPES, key=len, reverse=True))})",
    re.DOTALL,
)


_OF_A_TASK = re.compile(rf"(.*?:\{{[^}}]*\}}(?::and:[0-9a-f]+)?)({DONE}|{UNSENT})(.*)", re.DOTALL)


def mark_in(redis_key: str) -> tuple[str, str, str] | None:
    """
    Parse the name of a task's mark; None for keys of other things.

    Returns:
        The lock's name, DONE or UNSENT, and what is marked: a ticket, an owner or a task's id.
    """
    found = _OF_A_TASK.fullmatch(redis_key)
    return (found[1], found[2], found[3]) if found else None


def lock_in(redis_key: str) -> str | None:
    """Return the name of the lock that a Redis key belongs to; None for keys of other things.

    Keys of which a lock may have many are left out: they never come alone.
    """
    found = _OF_A_LOCK.fullmatch(redis_key)
    return found[1] if found else None
