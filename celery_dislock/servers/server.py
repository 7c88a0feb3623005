"""What every kind of lock server has in common, and the names on one."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from celery_dislock.exceptions import StoreError, UnreachableError
from celery_dislock.servers.connections import is_answer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from celery_dislock.scripts import Script
    from celery_dislock.servers.connections import Call, Command, Wire

SCANNED = 500  # names that a server examines in one step of a scan


class Member(NamedTuple):
    """
    One Redis process that has locks.

    Attributes:
        name: Its URL without password.
        send: Sends it a command; see :meth:`Server.send`.
        wire: The connections to it.
        has: Tells whether a key belongs there.
    """

    name: str
    send: Callable[..., Any]
    wire: Wire
    has: Callable[[str], bool] = lambda _key: True


class Server(Protocol):
    """
    A lock server.  Safe to use from many threads or greenlets.

    Attributes:
        name: The URL without its password, for messages.
        keeps_lines: Whether the server can keep waiters and parked tasks in line.
        kind: "single", "sentinel", "cluster" or "quorum".
        min_replicas: Number of replicas that must have an acquisition before it counts.
    """

    name: str
    kind: str
    keeps_lines: bool = True
    min_replicas: int = 0

    def together(self, keys: Sequence[str]) -> list[Sequence[str]]:
        """Group consecutive keys that one script can take together: here all."""
        return [keys]

    def known_as(self, owner: str) -> str:
        """Return the name under which the server knows an owner of this process: here the same."""
        return owner

    def run(self, script: Script, keys: Sequence[str], *arguments: str | bytes | int) -> Any:
        """
        Run a script.  Blocks for one round trip, or for a few if replies are lost.

        Args:
            script: The script.
            keys: The locks of one group; see :meth:`together`.
            arguments: Arguments of the script.

        Returns:
            The script's reply, strings as bytes.

        Raises:
            StoreError: No reply arrived, or the reply is an error.  The script may have run, unless
                the error is an UnreachableError.
        """
        return self.exchange(script, keys, *arguments)[0]

    def exchange(
        self, script: Script, keys: Sequence[str], *arguments: str | bytes | int
    ) -> tuple[Any, bool]:
        """
        Run a script as :meth:`run` does; return its reply, and whether an earlier one was lost.

        If one was lost, the script may have run twice.  The reply is then that of the last run,
        which found the changes of the first.
        """

    def run_many(self, script: Script, calls: Sequence[Call], *, within: float) -> list[Any]:
        """
        Run a script many times, in one pipelined round trip to each server concerned.

        Nothing is resent, except after a redirection in a cluster: the caller decides when to try
        again.

        Args:
            script: The script.
            calls: Key and arguments of each call.
            within: Seconds to connect if no connection is idle, and for each reply.

        Returns:
            The reply to each call, or a StoreError if the reply is an error.

        Raises:
            StoreError: No server answered.  Each call may have run or not.
        """

    def send(self, *command: str | bytes | int) -> Any:
        """
        Send a command that concerns no lock.

        Raises:
            StoreError: No reply arrived, or the reply is an error.  The command may have run.
        """

    def members(self) -> list[Member]:
        """
        Return the processes that have locks.

        Raises:
            StoreError: The nodes of a cluster are not known, or a slot is on none of them.
        """

    def senders(self) -> list[Callable[..., Any]]:
        """Return the *send* of each of :meth:`members`."""
        return [member.send for member in self.members()]

    def asks(self, key: str) -> list[Command]:
        """Return each command that is sent outside scripts, in a form that harms nobody."""
        pops: list[Command] = [(b"BLPOP", key, 0.01)] if self.keeps_lines else []
        return pops + ([(b"WAIT", 0, 0)] if self.min_replicas else [])

    def watchers(self) -> list[tuple[str, str]]:
        """Return each Sentinel, and why its answer does not count; empty: it does."""
        return []

    def pop(self, key: str, seconds: float) -> bytes | None:
        """Take an element from a list.  Blocks for at most *seconds*; None: none arrived."""

    def close(self) -> None:
        """Close the connections that are not in use."""


def keys_pattern(prefix: str, pattern: str) -> str:
    """Return the SCAN pattern that matches all keys in Redis of some locks.

    Args:
        prefix: Any text, matched literally.
        pattern: Pattern of the locks' keys, as SCAN takes it.
    """
    return f"{escaped(prefix)}:{{{pattern}}}*"


def escaped(literal: str) -> str:
    """Return the pattern, as SCAN takes it, that matches this text alone."""
    return re.sub(r"[\\*?\[\]]", r"\\\g<0>", literal)


def scan(send: Callable[..., Any], pattern: str) -> Iterator[list[str]]:
    """
    Yield the matching names on a server, in batches.  Each batch is one round trip.

    Args:
        send: Sends a command to that server.
        pattern: Pattern as SCAN takes it.

    Raises:
        StoreError: The server did not answer.
    """
    cursor = b"0"
    while True:
        cursor, names = send(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", SCANNED)
        yield [name.decode(errors="replace") for name in names]
        if cursor == b"0":
            return


def scan_all(server: Server, pattern: str, failed: list[StoreError]) -> Iterator[list[str]]:
    """
    Yield the matching names on each process of a lock server, as :func:`scan` does.

    Args:
        server: The lock server.
        pattern: Pattern as SCAN takes it.
        failed: Takes the error of each process that did not answer: the others are read.

    Raises:
        StoreError: None answered.
    """
    senders = server.senders()
    for send in senders:
        try:
            yield from scan(send, pattern)
        except StoreError as exc:
            failed.append(exc)
    if len(failed) == len(senders):
        raise failed[0]


def is_lost(reply: Any) -> bool:
    """Tell whether a command was sent and not answered: the server may run it at any later time."""
    unsent = isinstance(reply, UnreachableError)
    return isinstance(reply, StoreError) and not unsent and not is_answer(reply)


class Outage:
    """
    Notices when an outage of a server begins and ends, so that each is logged once.

    Attributes:
        lasts: Whether there is an outage.
    """

    def __init__(self) -> None:
        self.lasts = False
        self._refuses = False  # while it lasts: the server answers, with an error

    def begins(self, error: Exception | None = None) -> bool:
        """Take note of a failure, and of its error; return whether it is the first in a row."""
        self._refuses = isinstance(error, StoreError) and is_answer(error)
        first, self.lasts = not self.lasts, True
        return first

    def ends(self, *, took: bool = True) -> bool:
        """
        Take note of an answer; return whether that ends an outage.

        Args:
            took: Whether a lease was granted.  If not, a server that refused to grant one may still
                do so: a server without memory answers reads, and renews leases.
        """
        ends = self.lasts and (took or not self._refuses)
        self.lasts = self.lasts and not ends
        return ends
