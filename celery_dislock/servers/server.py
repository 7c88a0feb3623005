"""The lock server of a URL: one Redis, one that Sentinels watch, a Redis Cluster, or several.

What is common to all of them is a :class:`Server`, which is all that a store knows.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any, Protocol

from celery_dislock.config.urls import CLUSTER, SENTINEL
from celery_dislock.servers.cluster import Cluster
from celery_dislock.servers.connections import SOCKET_TIMEOUT
from celery_dislock.servers.node import RESENDS, single
from celery_dislock.servers.quorum.server import Quorum
from celery_dislock.servers.sentinel import watched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from celery_dislock.scripts import Script
    from celery_dislock.servers.connections import Command

__all__ = ["RESENDS", "SOCKET_TIMEOUT", "Server", "locks_pattern", "scan", "server_for"]

SCANNED = 500  # names that a server looks at in one step


class Server(Protocol):
    """
    Where locks are kept.  Safe to use from many threads or greenlets, but for :meth:`run_many`.

    Attributes:
        name: The URL as a message may show it.
        keeps_lines: Whether it can keep waiters, and parked tasks, in line.
    """

    name: str
    keeps_lines: bool

    def together(self, keys: Sequence[str]) -> list[Sequence[str]]:
        """Group keys, in their order, by what one script can be given."""

    def run(self, script: Script, keys: Sequence[str], *arguments: str | bytes | int) -> Any:
        """See :meth:`Node.run`, as for the others; keys that go together."""

    def exchange(
        self, script: Script, keys: Sequence[str], *arguments: str | bytes | int
    ) -> tuple[Any, bool]:
        """Run a script; return its reply too, and whether a reply before it was lost."""

    def send(self, *command: str | bytes | int) -> Any:
        """Send a command that is about no key."""

    def senders(self) -> list[Callable[..., Any]]:
        """Return, for each server that has locks of its own, what sends that one a command."""

    def asks(self, key: str) -> Sequence[Command]:
        """Return a form that does nothing of each command that is sent beside scripts."""

    def pop(self, key: str, seconds: float) -> bytes | None:
        """Take an element from a list; blocks until there is one, *seconds* at most."""

    def run_many(
        self, script: Script, calls: Sequence[tuple[str | bytes | int, ...]], *, within: float
    ) -> list[Any]:
        """Run a script many times, in one pipelined round trip to each server concerned."""

    def close(self) -> None:
        """Close the connections that are not in use."""


def server_for(
    url: str | Sequence[str],
    options: Mapping[str, Any] | None = None,
    *,
    pause: Callable[[float], None] = time.sleep,
) -> Server:
    """
    Return the lock server of a URL.  Connects to nothing yet.

    Args:
        url: redis://, rediss:// or unix://, Celery's redis+socket://, kombu's sentinel://,
            redis+cluster:// or rediss+cluster://; or a list of independent servers' URLs, three or
            more of the single kinds.
        options: Keyword arguments of redis-py's Connection, on top of the URL's, and:
            ``ssl`` for TLS where the URL does not say so; for sentinel:// kombu's ``master_name``,
            ``sentinel_kwargs`` and ``min_other_sentinels``; and ``min_replicas``, see
            :class:`celery_dislock.servers.node.Node`.
        pause: Called with seconds to wait between two attempts.

    Raises:
        SettingsError: The URL or an option cannot be used.
    """
    options = dict(options or {})
    min_replicas = options.pop("min_replicas", 0)
    kind: Callable[..., Server] = single
    if not isinstance(url, str):
        kind = Quorum
    elif url.startswith(SENTINEL):
        kind = watched
    elif url.startswith(CLUSTER):
        kind = Cluster
    return kind(url, options, pause=pause, min_replicas=min_replicas)


def locks_pattern(prefix: str) -> str:
    """Return the pattern of SCAN that the locks of this prefix match, and what is beside them not.

    Args:
        prefix: Any text; it stands for itself.
    """
    escaped = re.sub(r"[\\*?\[\]]", r"\\\g<0>", prefix)
    return f"{escaped}:{{*}}"


def scan(send: Callable[..., Any], pattern: str) -> Iterator[list[str]]:
    """
    Find the names on a server that match, step by step; each is a round trip.

    Args:
        send: Sends that server a command.
        pattern: See SCAN.

    Raises:
        StoreError: The server did not answer.
    """
    cursor = b"0"
    while True:
        cursor, names = send(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", SCANNED)
        yield [name.decode(errors="replace") for name in names]
        if cursor == b"0":
            return
