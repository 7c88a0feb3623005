"""Notice that a lock server has lost its data: it came back empty, or with older data.

A line that a server has forgotten looks like one that never was.  So the worker that sweeps leaves
a record on the server with each round, and each worker that may sweep remembers the record that it
saw last; see ``_epoch.lua``.  What was lost is written into the new record, where doctor reads it.

Not noticed is a loss of what was parked after the last round, and one after which no worker is
left that has seen the record before.
"""

from __future__ import annotations

import logging
from secrets import token_hex
from typing import TYPE_CHECKING, NamedTuple

from celery_dislock import scripts
from celery_dislock.scripts.names import epoch_of
from celery_dislock.servers.records import decode

if TYPE_CHECKING:
    from celery_dislock.servers.server import Server

NONE = "-"  # the epoch before, if no loss was noticed
HOW = {"empty": "without its data", "older": "with older data", "other": "with other data"}
REMEDY = (
    "Tasks whose result says PARKED and that are in no line are lost: send them again. `celery "
    "dislock why ID` tells it of each."
)

logger = logging.getLogger("celery_dislock")


class Loss(NamedTuple):
    """
    That a lock server has lost data.

    Attributes:
        how: In what state it came back, in words.
        was: Number of parked tasks at the last sweep before.
        left: Number of parked tasks when the loss was noticed.
        ago: Seconds since then.
    """

    how: str
    was: int
    left: int
    ago: float


class Epoch:
    """
    The time since a lock server has lost data, as one worker knows it.

    Args:
        server: The lock server; one that keeps lines.
        prefix: Prefix of the locks' names in Redis.
        broker: Name of the broker.

    Attributes:
        is_known: Whether this worker has seen a record, so that it would notice a loss.
    """

    def __init__(self, server: Server, prefix: str, broker: str) -> None:
        self._server = server
        self._name = epoch_of(prefix, broker)
        self._seen: tuple[str, int] = "", 0  # id, and when the lines were swept
        self._parked = 0

    @property
    def is_known(self) -> bool:
        """Whether this worker has seen a record."""
        return self._seen[0] != ""

    def look(self, parked: int | None = None) -> Loss | None:
        """
        Compare the server with what this worker has seen.  One round trip.

        Args:
            parked: Number of parked tasks that this worker's sweep has just counted; None: another
                worker sweeps.

        Returns:
            The loss that this worker is the first to notice; None: there is none.

        Raises:
            StoreError: The server did not answer.
        """
        new = token_hex(16)
        counted = "" if parked is None else parked
        found = self._server.run(
            scripts.EPOCH, [self._name], *self._seen, self._parked, counted, new
        )
        if not found:
            self._seen, self._parked = ("", 0), 0
            return None
        self._seen = decode(found[0]), int(found[1])
        self._parked = int(found[2]) if parked is None else parked
        return _loss(found) if self._seen[0] == new else None

    def last_loss(self) -> Loss | None:
        """
        Return the last loss that any worker has noticed; None: there was none.  One round trip.

        Raises:
            StoreError: The server did not answer.
        """
        found = self._server.run(scripts.EPOCH, [self._name])
        return _loss(found) if found else None


def _loss(found: list[bytes]) -> Loss | None:
    before, ago, was, left, how = map(decode, found[3:])
    if before == NONE:
        return None
    return Loss(HOW.get(how, how), int(was), int(left), int(ago) / 1000)


def log_loss(loss: Loss | None) -> None:
    """Log a loss that was noticed just now."""
    if loss is not None:
        #: ERROR: It was emptied, replaced, or restored from older data; locks that were held may be
        #: granted again. One worker logs it. -> Send the lost tasks again: those whose result says
        #: PARKED and that `celery dislock why ID` finds in no line.
        logger.error(
            "The lock server came back %s. Tasks that were parked at the last sweep before: %s; "
            "now: %s. %s",
            *(loss.how, loss.was, loss.left, REMEDY),
        )
