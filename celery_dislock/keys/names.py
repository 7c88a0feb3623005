"""How a delivery of a task is named on the lock server.

An owner is ``<task>@<worker>:<pid>/<count>``, and a ticket is ``<task>:<retries>:<nesting>``.
Scripts tell by how an owner begins which task and which process it belongs to, so no task's name
may look like the beginning of another's owner.  Task ids come from users, and from anybody who can
publish a message.  ``@``, ``~`` (a lease that runs out) and control characters are therefore
percent-encoded in them, and the numbers in a ticket are numbers, whatever the message says.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

from celery_dislock.keys.values import CONTROL, percent_encoded

NUMBER_MOST = 10**9  # of retries and replacements, in a ticket

_ENCODED = re.compile(rf"[%@~{CONTROL}]")


def task_name(task_id: object) -> str:
    """Return a task's id as names on the lock server have it."""
    return _ENCODED.sub(percent_encoded, str(task_id))


def owners_start(task_id: object) -> str:
    """Return how the owners of all deliveries of a task begin, and no other task's do."""
    return f"{task_name(task_id)}@"


def execution_start(task_id: object, hostname: str, pid: int) -> str:
    """Return the part of an owner's name that the main process knows as well as the child."""
    return f"{owners_start(task_id)}{hostname}:{pid}/"


def ticket_name(task_id: object, retries: object, nesting: object) -> str:
    """Name a ticket: its task, the number of its retry, and how often the task was replaced."""
    return f"{task_name(task_id)}:{_number(retries)}:{_number(nesting)}"


def task_id_of(ticket: str) -> str:
    """Return the id of a ticket's task."""
    return unquote(ticket.rsplit(":", 2)[0])


def _number(given: object) -> int:
    """Return a number that a message gives; 0 where it gives anything else."""
    if isinstance(given, int) and 0 <= given <= NUMBER_MOST:
        return int(given)
    return 0
