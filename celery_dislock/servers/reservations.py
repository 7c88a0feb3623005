"""Reservations of keys on the lock server: one message at a time waits for each key.

The sender of a message reserves its key, and confirms that when the message is sent.  The worker
that has the message keeps the reservation, begins the task, and ends the reservation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from celery_dislock.scripts import BEGIN, CONFIRM, RESERVE, UNRESERVE
from celery_dislock.servers.replies import Replaced, milliseconds, text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from celery_dislock.servers.server import Server


class Reservation(NamedTuple):
    """
    What a task's message says of the reservation of its key.

    Attributes:
        lock: Name in Redis under which the key is reserved.
        id: The task's id, as reserved_name() writes it.
        until: ``lock_unique_until`` of the sender.
        ttl: Seconds for which the reservation is kept while the task runs, until it is renewed.
    """

    lock: str
    id: str
    until: str
    ttl: float

    @property
    def terms(self) -> tuple[str, str, int]:
        """The arguments of the scripts that begin a task."""
        return self.id, self.until, milliseconds(self.ttl)


class Reserved(NamedTuple):
    """A key was reserved.

    Attributes:
        burst: Seconds since the first of the messages that this one is about to replace.
    """

    burst: float


class Taken(NamedTuple):
    """A key is reserved for another message.

    Attributes:
        id: Id of its task, as reserved_name() writes it.
        is_sent: Whether the message was sent; if not, its sender is about to, or has died.
    """

    id: str
    is_sent: bool


class Reservations:
    """
    The reservations on a lock server.

    A method blocks for a round trip.  All methods are safe to call from many threads or greenlets,
    except :meth:`keep`.

    Args:
        server: The lock server.
    """

    def __init__(self, server: Server) -> None:
        self._server = server

    def reserve(
        self, lock: str, encoded_id: str, ttl: float, *, replaces: bool
    ) -> Reserved | Taken:
        """
        Reserve a key for a message that is about to be sent.

        Args:
            lock: Name in Redis under which the key is reserved.
            encoded_id: Id of the message's task, as reserved_name() writes it.
            ttl: Seconds until the reservation ends if it is not confirmed.
            replaces: Whether the newest message counts, and not the first.

        Raises:
            StoreError: The server did not answer.  The key may be reserved.
        """
        done, *answer = self._server.run(
            RESERVE, [lock], encoded_id, milliseconds(ttl), int(replaces)
        )
        if done:
            return Reserved(answer[0] / 1000)
        return Taken(text(answer[0]), answer[1] != b"s")

    def confirm(self, lock: str, encoded_id: str, ttl: float) -> bool:
        """
        Keep a reservation for *ttl* seconds from now, as its message has been sent.

        Messages that this one replaces are told to end when they come.

        Args:
            lock: As for :meth:`reserve`.
            encoded_id: As for :meth:`reserve`.
            ttl: Seconds for which the message may wait.

        Returns:
            False if the key is not reserved for this task any more.

        Raises:
            StoreError: The server did not answer.
        """
        return bool(self._server.run(CONFIRM, [lock], encoded_id, milliseconds(ttl), 0))

    def keep(self, reservations: Sequence[Reservation], *, runs: bool, within: float) -> None:
        """
        Keep reservations for the time that each states, in one pipelined round trip.

        For one thread only, like :meth:`celery_dislock.servers.store.Store.renew`, and on the same
        connection.

        Args:
            reservations: The reservations.
            runs: Whether their tasks run; if not, their messages wait.
            within: Seconds to connect if there is no connection yet, and for the first reply.

        Raises:
            StoreError: The server did not answer.
        """
        calls = [(one.lock, one.id, milliseconds(one.ttl), int(runs)) for one in reservations]
        self._server.run_many(CONFIRM, calls, within=within)

    def begin(self, reservation: Reservation, *, elsewhere: bool = False) -> None:
        """
        Begin a task whose message was reserved, if the acquisition of its lock did not.

        Its reservation ends, or is kept while the task runs, as its sender wanted.

        Args:
            reservation: The reservation.
            elsewhere: Whether its name is not of the task's own locks.  Then a reservation that is
                gone is not made again.

        Raises:
            Replaced: The task must not run.
            StoreError: The server did not answer.
        """
        by = self._server.run(BEGIN, [reservation.lock], *reservation.terms, int(elsewhere))
        if by is not None:
            raise Replaced(text(by))

    def end(self, lock: str, encoded_id: str) -> bool:
        """
        End a reservation.

        Args:
            lock: As for :meth:`reserve`, or from the :class:`Reservation`.
            encoded_id: As for :meth:`reserve`, or from the :class:`Reservation`.

        Returns:
            False if the key was not reserved for this task.

        Raises:
            StoreError: The server did not answer.
        """
        return bool(self._server.run(UNRESERVE, [lock], encoded_id))
