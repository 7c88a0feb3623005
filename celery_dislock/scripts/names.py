"""The names of Redis keys, as the scripts write them.

The keys of a lock begin with its name and end as ``_names.lua`` says, which is read here: what
Python names, and what it tells people, is what the scripts use.
"""

from __future__ import annotations

import re

from celery_dislock.scripts.files import read_lua

_ENDING = re.compile(r"^local ([A-Z]+) = '(:.*?)' +-- (\w+)", re.MULTILINE)

_FOUND = _ENDING.findall(read_lua("_names"))
_ENDS = {name: end for name, end, _ in _FOUND}

# The type of each key that a lock has one of, by what follows the lock's name.
KINDS = {"": "hash"} | {end: kind for _, end, kind in _FOUND if end[-1].isalpha()}


def wake_list(lock: str, owner: str) -> str:
    """Name the list on which an owner that waits for the lock is told news."""
    return f"{lock}{_ENDS['WAKE']}{owner}"


def mark_of(lock: str, task_id: str) -> str:
    """Name the mark about a task beside the lock."""
    return f"{lock}{_ENDS['MARK']}{task_id}"


def aside_of(lock: str) -> str:
    """Name the hash of the parked tasks that nobody could read or run."""
    return f"{lock}{_ENDS['ASIDE']}"


def index_of_lines(prefix: str, home: str) -> str:
    """Name the hash of the locks that have tasks of one broker in line."""
    return f"{prefix}:lines:{home}"


def sweep_lock(prefix: str, home: str) -> str:
    """Name the lock of the worker that looks after these lines."""
    return f"{prefix}:sweep:{{{home}}}"
