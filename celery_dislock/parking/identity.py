"""The name of a store, by which a process tells tasks that were parked elsewhere.

A store is the locks of one prefix on one lock server.  It has a random name, which is kept there: a
URL can be spelled in many ways, and each failover changes an address.  The message of a parked task
carries the name.  A worker with another store has another name.  If that worker ran the task, the
line would give it another turn, and it would run twice.

A store that has lost its data gets another name.  A process that knows the old one notes that both
are the same store, so that tasks on their way run.  When a store is drained, all tasks
that are not done there are sent on.  So a task that it does not know afterwards is a copy.
"""

from __future__ import annotations

import logging
from secrets import token_hex
from typing import TYPE_CHECKING, NamedTuple

from celery_dislock.scripts import STORE
from celery_dislock.scripts.names import store_of
from celery_dislock.servers.records import text

if TYPE_CHECKING:
    from celery_dislock.servers.server import Server

NAME_BYTES = 8  # of a store's name, which is written in hexadecimal digits
ELSEWHERE, OURS, DRAINED = range(3)  # whose a parked task is; see store.lua

logger = logging.getLogger("celery_dislock")


class Came(NamedTuple):
    """The last task that came here, and was parked in a store that is not known here."""

    store: str  # its name
    ago: float  # seconds


class StoreIdentity:
    """
    The name of a store.  Every method blocks for a round trip at most; thread-safe.

    Args:
        server: The lock server.
        prefix: Prefix of the locks' names in Redis.
    """

    def __init__(self, server: Server, prefix: str) -> None:
        self._server = server
        self._key = store_of(prefix)
        self._name = ""

    def name(self) -> str:
        """
        Return the store's name; asks once per process.

        Raises:
            StoreError: The server did not answer.
        """
        return self._name or self.confirm()

    def confirm(self) -> str:
        """
        Ask for the store's name again, and keep it for as long as a line is kept.

        Raises:
            StoreError: The server did not answer.
        """
        self._ask()
        return self._name

    def whose(self, name: str) -> int:
        """
        Tell to which store a task belongs that was parked in the store of this name.

        Returns:
            ELSEWHERE; OURS; or DRAINED: to this one, to which all was sent that was left there.

        Raises:
            StoreError: The server did not answer.
        """
        return OURS if name == self.name() else self._ask(name)

    def take_over(self, name: str, *, drained: bool = False) -> None:
        """
        From now on, tasks that were parked in the store of this name belong here.

        Args:
            name: The name of the other store.
            drained: Whether all was sent to here that was not done there; else its data was lost.

        Raises:
            StoreError: The server did not answer.
        """
        self._ask(name, "drained" if drained else "taken")

    def rename(self) -> None:
        """
        Give the store another name after it was drained: what is parked from now on was not.

        Raises:
            StoreError: The server did not answer.
        """
        new = token_hex(NAME_BYTES)
        self._ask(new, "renamed")

    def last_stranger(self) -> Came | None:
        """
        Return the last task that came here from a store that is not known here; None: none came.

        Raises:
            StoreError: The server did not answer.
        """
        _, _, store, ago_ms = self._server.run(STORE, [self._key], "", "", "")
        return Came(text(store), ago_ms / 1000) if store else None

    def _ask(self, other: str = "", asked: str = "came") -> int:
        known = self._name
        wanted = known or token_hex(NAME_BYTES)
        name, whose, *_ = self._server.run(STORE, [self._key], wanted, other, asked)
        self._name = text(name)
        if (
            known and known != self._name and asked != "renamed"
        ):  # its data was lost, and another process came first
            logger.warning(
                "The lock server %s has lost its data: parked tasks whose messages were not on "
                "their way are gone.",
                self._server.name,
            )
            self.take_over(known)
        return OURS if other == known != "" else int(whose)
