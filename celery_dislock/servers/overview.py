"""Look at one lock or at many, on the lock server; see :mod:`celery_dislock.servers.view`."""

from __future__ import annotations

from itertools import chain, islice
from typing import TYPE_CHECKING

from celery_dislock.exceptions import DamagedLockError, StoreError
from celery_dislock.keys.names import reserved_lock
from celery_dislock.scripts import LOOK
from celery_dislock.scripts.names import lock_in
from celery_dislock.servers.connections import SOCKET_TIMEOUT
from celery_dislock.servers.server import keys_pattern, scan_all
from celery_dislock.servers.view import LockState, read_state, state_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from celery_dislock.servers.server import Server

PLACES_SHOWN = 20  # of a line, unless more are asked for
SEARCHED = 200  # places in line that are looked at in one round trip
TOGETHER = 100  # locks that are looked at in one round trip: 1 or 2 ms of the server


class Overview:
    """
    Reads the locks of a lock server.  Each method blocks for its round trips; thread-safe.

    Args:
        server: The lock server.
        prefix: Prefix of the locks' names in Redis.

    Attributes:
        server, prefix: The arguments of these names.
    """

    def __init__(self, server: Server, prefix: str) -> None:
        self.server, self.prefix = server, prefix

    def lock(self, name: str, first: int = 0, most: int = PLACES_SHOWN) -> LockState:
        """
        Look at one lock.

        Args:
            name: Its name in Redis.
            first: Place in line to begin with, from 0.
            most: Maximum number of places.

        Raises:
            DamagedLockError: A record of the lock cannot be read.
            StoreError: The server did not answer.
        """
        return read_state(self.server, name, first, most)

    def names(
        self, pattern: str = "*", failed: list[StoreError] | None = None
    ) -> Iterator[list[str]]:
        """
        List the names of locks whose keys match, each once, in pages of :data:`TOGETHER`.

        The server answers other clients in between.  A lock that comes or goes meanwhile may be
        listed or not.

        Args:
            pattern: Pattern of keys, with Redis's wildcards ``*``, ``?`` and ``[a-z]``.
            failed: Takes the error of each server that did not answer, which is then not raised;
                the other servers are read.

        Raises:
            StoreError: A server did not answer; of several independent servers, no majority did.
                With *failed*: none did.
        """
        errors: list[StoreError] = [] if failed is None else failed
        names = self._names(keys_pattern(self.prefix, pattern), errors)
        while page := list(islice(names, TOGETHER)):
            yield page
        if failed is None and errors:
            may_fail = (len(self.server.senders()) - 1) // 2 if self.server.kind == "quorum" else 0
            if len(errors) > may_fail:
                raise errors[0]

    def _names(self, pattern: str, failed: list[StoreError]) -> Iterator[str]:
        listed: set[str] = set()
        for redis_key in chain.from_iterable(scan_all(self.server, pattern, failed)):
            name = lock_in(redis_key)
            if name is not None and name not in listed:
                listed.add(name)
                yield name

    def look(self, names: Sequence[str], most: int = 0) -> list[LockState | StoreError]:
        """Look at several locks, with *most* places of their lines, in one pipelined round trip."""
        calls = [(name, 0, most) for name in names]
        replies = self.server.run_many(LOOK, calls, within=SOCKET_TIMEOUT)
        return [
            reply if isinstance(reply, StoreError) else self._seen(name, reply)
            for name, reply in zip(names, replies, strict=True)
        ]

    def _seen(self, name: str, reply: Sequence[Any]) -> LockState | StoreError:
        try:
            return state_of(self.server.name, name, reply)
        except DamagedLockError as exc:  # the others can be read
            return exc


def look_at_all(server: Server, names: Sequence[str], most: int = PLACES_SHOWN) -> list[LockState]:
    """
    Look at the locks that one task takes, in this order.

    Returns:
        The state of each.  One more follows if their keys are reserved together.

    Raises:
        DamagedLockError, StoreError: As for :meth:`Overview.lock`.
    """
    found = [read_state(server, name, most=most) for name in names]
    together = read_state(server, reserved_lock(names)) if len(names) > 1 else None
    return [*found, together] if together is not None and together.exists else found
