"""Reservations of keys on the lock server: one message at a time waits for each key."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from celery_dislock.keys.names import reserved_name, task_id_of_reserved
from celery_dislock.scripts import CONFIRM, RESERVE, UNRESERVE
from celery_dislock.servers.replies import milliseconds, text

if TYPE_CHECKING:
    from celery_dislock.servers.server import Server


class Reserved(NamedTuple):
    """A key was reserved.

    Attributes:
        burst: Seconds since the first of the messages that this one is about to replace.
    """

    burst: float


class Taken(NamedTuple):
    """A key is reserved for another message.

    Attributes:
        id: Id of its task.
        is_sent: Whether the message was sent; if not, its sender is about to, or has died.
    """

    id: str
    is_sent: bool


class Reservations:
    """
    The reservations on a lock server.  Each method blocks for a round trip.

    Args:
        server: The lock server.
    """

    def __init__(self, server: Server) -> None:
        self._server = server

    def reserve(self, lock: str, task_id: str, ttl: float, *, replaces: bool) -> Reserved | Taken:
        """
        Reserve a key for a message that is about to be sent.

        Args:
            lock: Name of the key's lock in Redis.
            task_id: Id of the message's task.
            ttl: Seconds until the reservation ends if it is not confirmed.
            replaces: Whether the newest message counts, and not the first.

        Raises:
            StoreError: The server did not answer.  The key may be reserved.
        """
        done, *answer = self._server.run(
            RESERVE, [lock], reserved_name(task_id), milliseconds(ttl), int(replaces)
        )
        if done:
            return Reserved(answer[0] / 1000)
        return Taken(task_id_of_reserved(text(answer[0])), answer[1] != b"s")

    def confirm(self, lock: str, task_id: str, ttl: float) -> bool:
        """
        Keep a reservation for *ttl* seconds from now, as its message has been sent.

        Messages that this one replaces are told to end when they come.

        Returns:
            False if the key is not reserved for this task any more.

        Raises:
            StoreError: The server did not answer.
        """
        return bool(self._server.run(CONFIRM, [lock], reserved_name(task_id), milliseconds(ttl), 0))

    def end(self, lock: str, task_id: str) -> bool:
        """
        End a reservation.

        Returns:
            False if the key was not reserved for this task.

        Raises:
            StoreError: The server did not answer.
        """
        return bool(self._server.run(UNRESERVE, [lock], reserved_name(task_id)))
