"""Try all that locks need on the lock server: run each script once, and send the other commands.

Only a trial tells whether a server, or a proxy before it, refuses scripts: each words this in its
own way.  Without the trial, a refusal is noticed when the command is first needed.  A command that
only a waiter sends may then fail a task long after the worker has started.

The scripts play the life of one lock, in which they call all commands that any of them calls.  The
lock has a name that nobody uses, in the slots of the node that is tried, and is deleted at the end.
Each error counts that does not pass by itself.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from typing import TYPE_CHECKING, NamedTuple

from redis.exceptions import AskError, ClusterDownError, NoScriptError, TryAgainError

from celery_dislock.exceptions import ForbiddenError, StoreError
from celery_dislock.scripts.life import Life
from celery_dislock.servers.connections import AROUND, Demoted, by_digest, by_text, is_answer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from celery_dislock.scripts import Script
    from celery_dislock.servers.connections import Command
    from celery_dislock.servers.server import Member, Server

TAGS_MOST = 100_000  # a node with one of 16,384 slots has one of them

# Errors that do not count: the answer changes soon, or the script is only not cached yet.
MOVES = (AskError, ClusterDownError, TryAgainError, NoScriptError)
BUSY = re.compile(r"\b(BUSY|MASTERDOWN)\b")
CALLED = re.compile(r"redis\.p?call(?:\(|, )'([A-Z]+)'")
LINE = re.compile(r"user_script:\s*(\d+)")
NAMED = re.compile(r"'([\w|]+)' command")


class Cause(NamedTuple):
    """
    A kind of refusal.

    Attributes:
        words: Pattern by which a server's text is recognized.
        what: What the server does.
        remedy: What to do about it.
        passes: Whether the server may accept the command later, without a change.
    """

    words: re.Pattern[str]
    what: str
    remedy: str
    passes: bool = False


# In both texts {commands}, {rules} for an ACL, {prefix} of the keys and {text}, the server's own.
CAUSES = (
    Cause(
        re.compile(r"\bOOM\b|maxmemory"),
        "it refuses to write, so no lock can be taken ({text}). Locks that are held can be renewed "
        "and released",
        "raise maxmemory, or keep the locks on a server of their own (dislock_url)",
        passes=True,
    ),
    Cause(
        re.compile(r"\b(MISCONF|NOREPLICAS)\b"),
        "it refuses to write, so no lock can be taken ({text})",
        "look at its log, and at its disk",
        passes=True,
    ),
    Cause(
        re.compile(r"undeclared|KEYS array", re.IGNORECASE),
        "it refuses scripts that use keys which they derive from the name of a lock ({text})",
        "allow undeclared keys (Dragonfly: --default_lua_flags=allow-undeclared-keys), or "
        "keep the locks on a Redis or Valkey (dislock_url)",
    ),
    Cause(
        re.compile(r"(can't|permissions? to) access .*\bkeys?\b", re.IGNORECASE),
        "its user may not touch all keys that begin with '{prefix}'",
        "allow it on every server: ACL SETUSER ... ~{prefix}:*",
    ),
    Cause(
        re.compile(r"can't run this command|no permissions to run", re.IGNORECASE),
        "its user may not run {commands}",
        "allow it on every server: ACL SETUSER ... {rules}",
    ),
    Cause(
        re.compile(r"unknown (redis )?command", re.IGNORECASE),
        "it does not know {commands} ({text})",
        "give the commands their names back if rename-command took them, or "
        "keep the locks on a Redis or Valkey (dislock_url)",
    ),
    Cause(
        re.compile(""),
        "it refuses {commands} ({text})",
        "keep the locks on a Redis or Valkey that runs Lua scripts (dislock_url)",
    ),
)


class Complaint(NamedTuple):
    """
    All refusals of one kind.

    Attributes:
        what: What the servers refuse.
        remedy: What to do about it.
        servers: Their names.
        passes: See :class:`Cause`.
    """

    what: str
    remedy: str
    servers: Sequence[str]
    passes: bool


def check_scripts(server: Server, prefix: str) -> None:
    """
    Check that the lock server does all that locks need; see :func:`complaints`.

    A refusal that passes by itself, as that of a full memory, does not count: locks that are held
    need their worker.

    Args:
        server: The lock server.
        prefix: Prefix of all names in Redis: ``dislock_prefix``.

    Raises:
        ForbiddenError: The server refuses something.  The message says what, and what to do.
        StoreError: The list of servers could not be read.
    """
    found = [complaint for complaint in complaints(server, prefix) if not complaint.passes]
    if found:
        servers = dict.fromkeys(name for complaint in found for name in complaint.servers)
        reason = "; and ".join(f"{complaint.what}; {complaint.remedy}" for complaint in found)
        raise ForbiddenError(", ".join(servers), reason)


def complaints(server: Server, prefix: str) -> list[Complaint]:
    """
    Try all that locks need.  One round trip to each process.

    A process that does not answer is skipped.  One that refuses something is asked once more, one
    command at a time.

    Args:
        server: The lock server.
        prefix: Prefix of all names in Redis: ``dislock_prefix``.

    Returns:
        The refusals, one complaint for each cause.

    Raises:
        StoreError: The list of servers could not be read.
    """
    found: dict[Cause, list[tuple[str, str, str]]] = {}
    for member in server.members():
        for command, text in _Trial(server, member, prefix).refused():
            cause = next(cause for cause in CAUSES if cause.words.search(text))
            found.setdefault(cause, []).append((member.name, command, text))
    return [
        _complaint(cause, prefix, *zip(*refused, strict=True)) for cause, refused in found.items()
    ]


def _complaint(
    cause: Cause, prefix: str, servers: Sequence[str], refused: Sequence[str], texts: Sequence[str]
) -> Complaint:
    commands = sorted(set(refused))
    told = {
        "commands": ", ".join(commands),
        "rules": " ".join(f"+{command.lower()}" for command in commands),
        "prefix": prefix,
        "text": texts[0],
    }
    what, remedy = (text.format_map(told) for text in (cause.what, cause.remedy))
    return Complaint(what, remedy, list(dict.fromkeys(servers)), cause.passes)


class _Trial:
    """The trial of one process."""

    def __init__(self, server: Server, member: Member, prefix: str) -> None:
        self._member = member
        once = secrets.token_hex(4)
        tags = (f"trial-{once}-{number}" for number in range(TAGS_MOST))
        # With braces in the prefix, all names may be in a slot of another node.
        tag = next((tag for tag in tags if member.has(f"{prefix}:{{{tag}}}")), once)
        life = Life(prefix, tag)
        self._keys = life.keys()
        steps = list(life.steps())
        (script, keys, _), *_ = steps
        asks: list[Command] = [
            *server.asks(life.news),
            (b"SCAN", 0, b"COUNT", 1),
            (b"DEL", *self._keys),
        ]
        # Each with the script that it runs.
        self._commands: list[tuple[Script | None, Command]] = [
            *((script, by_text(script, keys, *arguments)) for script, keys, arguments in steps),
            (script, by_digest(script, keys)),  # the other way, too
            *((None, command) for command in asks),
            *((None, (b"PEXPIRE", key, 1)) for key in self._keys),  # where it may not delete
        ]

    def refused(self) -> list[tuple[str, str]]:
        """Return each command that is refused, and the server's words; nothing if it is away."""
        with contextlib.suppress(StoreError):
            replies = self._member.wire.ask([command for _, command in self._commands])
            if not any(isinstance(reply, StoreError) for reply in replies):
                return []
        try:
            return list(self._one_by_one())  # what is lost is sent again
        finally:
            self._error_of((b"DEL", *self._keys))

    def _one_by_one(self) -> Iterator[tuple[str, str]]:
        for script, command in self._commands:
            error = self._error_of(command)
            if error and not is_answer(error):
                if isinstance(error.raw, Demoted) or not self._is_there():
                    return
                error = self._error_of(command)  # perhaps it was away for a moment
            if error is None or isinstance(error.raw, MOVES) or BUSY.search(error.reason):
                continue
            text = AROUND.sub("", error.reason)
            for name in _names(script, command, error.reason):
                yield name, text
            if not is_answer(error):  # nor will it answer to others
                return

    def _error_of(self, command: Command) -> StoreError | None:
        try:
            self._member.send(*command)
        except StoreError as exc:
            return exc
        return None

    def _is_there(self) -> bool:
        """Tell whether the process answers, though not to the last command."""
        error = self._error_of((b"PING",))
        return error is None or is_answer(error)


def _names(script: Script | None, command: Command, text: str) -> list[str]:
    """Name the Redis command that an error is about; or those in the line of the script."""
    named, line = NAMED.search(text), LINE.search(text)
    if named:
        return [named[1].upper()]
    if script and line:
        number = int(line[1])
        called = CALLED.findall("".join(script.text.splitlines()[number - 1 : number]))
    else:
        called = []
    return called or [_sent(command)]


def _sent(command: Command) -> str:
    first = command[0]
    return first.decode() if isinstance(first, bytes) else str(first)
