"""Choose the kind of lock server for a URL: one Redis, Sentinels, a Redis Cluster, or several.

All kinds have the interface :class:`Server`, which is all that a store uses.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any, Protocol

from celery_dislock.config.urls import CLUSTER, SENTINEL
from celery_dislock.servers.connections import SOCKET_TIMEOUT
from celery_dislock.servers.node import RESENDS, single

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from celery_dislock.scripts import Script
    from celery_dislock.servers.connections import Command

__all__ = [
    "RESENDS",
    "SOCKET_TIMEOUT",
    "Server",
    "keys_pattern",
    "scan",
    "server_for",
]

SCANNED = 500  # names that a server examines in one step of a scan


class Server(Protocol):
    """
    A lock server.  Safe to use from many threads or greenlets, except :meth:`run_many`.

    Attributes:
        name: The URL without its password, for messages.
        keeps_lines: Whether the server can keep waiters and parked tasks in line.
        kind: "single", "sentinel", "cluster" or "quorum".
    """

    name: str
    keeps_lines: bool
    kind: str

    def together(self, keys: Sequence[str]) -> list[Sequence[str]]:
        """Group consecutive keys that one script can take together."""

    def run(self, script: Script, keys: Sequence[str], *arguments: str | bytes | int) -> Any:
        """Run a script on the keys of one group; see :meth:`Node.run`."""

    def exchange(
        self, script: Script, keys: Sequence[str], *arguments: str | bytes | int
    ) -> tuple[Any, bool]:
        """Run a script; return its reply, and whether an earlier reply was lost."""

    def send(self, *command: str | bytes | int) -> Any:
        """Send a command that concerns no key."""

    def senders(self) -> list[Callable[..., Any]]:
        """Return a function for each server that has locks, which sends that server a command."""

    def members(self) -> list[tuple[str, Callable[..., Any]]]:
        """Return the senders, each with the name of its server, for messages."""

    def asks(self, key: str) -> Sequence[Command]:
        """Return each command that is sent outside scripts, in a form that changes nothing."""

    def pop(self, key: str, seconds: float) -> bytes | None:
        """Take an element from a list.  Blocks for at most *seconds*."""

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
    Return the lock server of a URL.  Does not connect yet.

    Args:
        url: redis://, rediss:// or unix://, Celery's redis+socket://, kombu's sentinel://,
            redis+cluster:// or rediss+cluster://; or a list of three or more URLs of independent
            single servers.
        options: Keyword arguments of redis-py's Connection, in addition to those of the URL.  Also
            ``ssl`` for TLS if the URL does not ask for it; for sentinel:// kombu's
            ``master_name``, ``sentinel_kwargs`` and ``min_other_sentinels``; and ``min_replicas``,
            see :class:`celery_dislock.servers.node.Node`.
        pause: Called with the seconds to wait between two attempts.

    Raises:
        SettingsError: The URL or an option cannot be used.
    """
    options = dict(options or {})
    min_replicas = options.pop("min_replicas", 0)
    kind: Callable[..., Server] = single
    # Imported when asked for: most processes have a single server, and a web process starts fast.
    if not isinstance(url, str):
        from celery_dislock.servers.quorum import Quorum  # noqa: PLC0415

        kind = Quorum
    elif url.startswith(SENTINEL):
        from celery_dislock.servers.sentinel import watched  # noqa: PLC0415

        kind = watched
    elif url.startswith(CLUSTER):
        from celery_dislock.servers.cluster import Cluster  # noqa: PLC0415

        kind = Cluster
    return kind(url, options, pause=pause, min_replicas=min_replicas)


def keys_pattern(prefix: str, pattern: str) -> str:
    """Return the SCAN pattern that matches all keys in Redis of some locks.

    Args:
        prefix: Any text, matched literally.
        pattern: Pattern of the locks' keys, as SCAN takes it.
    """
    return f"{_escaped(prefix)}:{{{pattern}}}*"


def _escaped(prefix: str) -> str:
    return re.sub(r"[\\*?\[\]]", r"\\\g<0>", prefix)


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
