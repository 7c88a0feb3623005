"""Check that the lock server's user may do what locks need, by trying each command.

Without this check, a forbidden command is noticed only when it is first needed.  A command that
only a waiter sends may then fail a task long after the worker has started.  So a worker tries all
commands when it starts.  The list of commands that the scripts run is read from the scripts.

The server checks a user's permissions before it looks at the arguments.  So a command that fails
with another error is allowed.  No command is tried on a key that is in use.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from celery_dislock.exceptions import ForbiddenError, StoreError
from celery_dislock.scripts import TRY, Script, commands
from celery_dislock.scripts.names import index_of_lines, store_of, sweep_lock
from celery_dislock.servers.connections import is_answer

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery_dislock.servers.connections import Command
    from celery_dislock.servers.server import Server

UNKNOWN = Script("", "0" * 40)  # a digest that no script has

_KEY = re.compile(r"(can't|permissions? to) access .*\bkeys?\b", re.IGNORECASE)
_COMMAND = re.compile(
    r"can't run this command|no permissions to run|unknown (redis )?command", re.IGNORECASE
)


def check_rights(server: Server, prefix: str) -> None:
    """
    Check that the server's user may do all that locks need.  A few round trips to each server.

    A server that does not answer is skipped.

    Args:
        server: The lock server.
        prefix: Prefix of all names in Redis: ``dislock_prefix``.

    Raises:
        ForbiddenError: A command or key is forbidden.  The message says which, and how to allow it.
        StoreError: The list of servers could not be read.
    """
    missing: set[str] = set()
    keys = False
    for send in server.senders():
        for command, error in _errors(send, server, prefix):
            keys = keys or bool(_KEY.search(error))
            if _COMMAND.search(error):
                missing.add(command)
    if missing or keys:
        raise ForbiddenError(server.name, _remedy(sorted(missing), prefix if keys else ""))


def tried_in(prefix: str) -> str:
    """Return the name of a key that nobody uses, to try commands on."""
    return f"{prefix}:{{startup-check}}:tried"


def _errors(send: Callable[..., Any], server: Server, prefix: str) -> list[tuple[str, str]]:
    """Try the commands on one server; return name and error text of each that failed."""
    lock = f"{prefix}:{{startup-check}}"
    tried = tried_in(prefix)
    names = (tried, lock, index_of_lines(prefix, "x"), store_of(prefix), sweep_lock(prefix, "x"))
    errors: list[tuple[str, str]] = []
    asked: list[Command] = [
        *(UNKNOWN.by_digest([name]) for name in names),
        (b"SCAN", 0, b"COUNT", 1),
        *server.asks(tried),
        TRY.by_text([], tried, *commands()),
    ]
    for command in asked:
        try:
            reply = send(*command)
        except StoreError as exc:
            if not is_answer(exc):
                return errors
            errors.append((str(command[0], "ascii"), exc.reason))  # type: ignore[arg-type]
        else:
            if command[0] == b"EVAL":
                texts = [part.decode(errors="replace") for part in reply]
                errors += zip(*[iter(texts)] * 2, strict=True)
    return errors


def _remedy(missing: list[str], prefix: str) -> str:
    parts = []
    if missing:
        parts.append(f"may not run {', '.join(missing)}")
    if prefix:
        parts.append(f"may not touch all keys that begin with {prefix!r}")
    rules = [f"+{command.lower()}" for command in missing] + ([f"~{prefix}:*"] if prefix else [])
    remedy = f"allow it on every server: ACL SETUSER ... {' '.join(rules)}"
    return f"its user {' and '.join(parts)}; {remedy}"
