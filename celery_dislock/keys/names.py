"""Names of a task's deliveries on the lock server: owners and tickets.

An owner is ``<task>@<worker>:<pid>/<count>``, that of a lock which the task's body takes is
``<task>:~<count>@<host>:<pid>:<thread>/``, and a ticket is ``<task>:<retries>:<nesting>``.
Scripts find the owners of one task or one process by their prefix.  The prefix of one task must
therefore never match an owner of another task.  Task ids are untrusted: they come from users, and
from anybody who can publish a message.  ``@``, ``~`` (which marks a lease that is left to expire)
and control characters in them are percent-encoded.  The numbers in a ticket are always integers,
whatever the message contains.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from celery_dislock.keys.templates import CONTROL, DIGEST_CHARS, percent_encoded
from celery_dislock.words import TEXT_MOST

if TYPE_CHECKING:
    from collections.abc import Sequence

NUMBER_MOST = 10**9  # maximum number of retries or replacements in a ticket

_ENCODED = re.compile(rf"[%@~{CONTROL}]")
_ENCODED_IN_RESERVED = re.compile(rf"[%@~ ,{CONTROL}]")


def shown_id(task_id: object) -> str:
    """Return a task's id as a holder shows it: text of limited length, for any id in a message."""
    return str(task_id)[:TEXT_MOST]


def task_name(task_id: object) -> str:
    """Return a task's id, encoded for names on the lock server."""
    return _ENCODED.sub(percent_encoded, str(task_id))


def owners_start(task_id: object) -> str:
    """Return the prefix of the owners of all deliveries of this task, and of no other task."""
    return f"{task_name(task_id)}@"


def body_owners_start(task_id: object) -> str:
    """Return the prefix of the owners of locks that bodies of this task take, and of no other."""
    return f"{task_name(task_id)}:~"  # no name has a "~", and no owner that is live begins with one


def execution_start(task_id: object, hostname: str, pid: int) -> str:
    """Return the prefix of an owner's name that the worker's main process can also compute."""
    return f"{task_name(task_id)}@{hostname}:{pid}/"


def body_owner(task_id: object, own: str, caller: str) -> str:
    """
    Return the owner of a lock that a task's body takes.

    Its start is this owner's alone, so no other lease of the task counts as a copy of it.

    Args:
        task_id: The task's id.
        own: A text that no other owner has.
        caller: Who takes it: host, process and thread.
    """
    return f"{body_owners_start(task_id)}{own}@{caller}"


def ticket_of_request(request: Any) -> str:
    """Return the ticket of a request's work; Celery's Context, or an object with its attributes."""
    numbers = f"{_number(request.retries)}:{_number(request.replaced_task_nesting)}"
    return f"{task_name(request.id)}:{numbers}"


def task_id_of(ticket: str) -> str:
    """Return the id of a ticket's task."""
    return task_id_of_reserved(ticket.rsplit(":", 2)[0])


def reserved_lock(locks: Sequence[str]) -> str:
    """Return the name in Redis under which the key of these locks is reserved for a message.

    This name begins with that of the first lock in the alphabet, so both are in one slot of a
    cluster, and the name stays the same if a limit changes the order of the locks.
    """
    first, *others = sorted(locks)
    if not others:
        return first
    digest = hashlib.sha256("\0".join(others).encode()).hexdigest()[:DIGEST_CHARS]
    return f"{first}:and:{digest}"


def is_of_one(reserved: str) -> bool:
    """Tell whether such a name is of one lock alone."""
    return reserved.endswith("}")


def reserved_name(task_id: object) -> str:
    """Return a task's id, encoded for a reservation, whose fields are separated by spaces."""
    return _ENCODED_IN_RESERVED.sub(percent_encoded, str(task_id))


def task_id_of_reserved(name: str) -> str:
    """Return the id of the task that a reservation is for."""
    try:
        return unquote(name, errors="surrogatepass")  # the id may have a lone surrogate
    except UnicodeDecodeError:  # not written by this package
        return name


def _number(given: object) -> int:
    """Return a number from a message; 0 if the value is not an integer in range."""
    if isinstance(given, int) and 0 <= given <= NUMBER_MOST:
        return int(given)
    return 0
