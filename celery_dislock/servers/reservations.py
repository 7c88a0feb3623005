"""Reservations of keys on the lock server: one message at a time waits for each key.

The sender of a message reserves its key, and confirms that when the message is sent.  The worker
that has the message keeps the reservation, begins the task, and ends the reservation.
"""

from __future__ import annotations

from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from celery_dislock.keys.names import reserved_name
from celery_dislock.scripts import BEGIN, CONFIRM, RESERVE, UNRESERVE, milliseconds
from celery_dislock.scripts.names import UNIQUE
from celery_dislock.servers.records import decode
from celery_dislock.servers.replies import Replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from celery_dislock.servers.server import Server
    from celery_dislock.servers.view import ReservationState

OFF_FOR = 3600.0  # seconds for which a key stays reserved for a task that runs where locks are off


class Reservation(NamedTuple):
    """
    The reservation of a key for a message, as the message states it.

    Attributes:
        lock: Name in Redis under which the key is reserved.
        id: Id of the message's task, as reserved_name() writes it.
        until: ``lock_unique_until`` of the sender.
        ttl: Seconds for which the reservation is kept when the task begins, and at each renewal.
        mark: Text that the lock server has given with the number; "-": none.
        number: Number among the messages of the key that replace each other.
    """

    lock: str
    id: str
    until: str = "end"
    ttl: float = 0.0
    mark: str = "-"
    number: int = 0

    @classmethod
    def of(cls, lock: str, found: ReservationState) -> Reservation:
        """Return a value that identifies a reservation which was found, and no later one."""
        return cls(lock, reserved_name(found.id), mark=found.mark, number=found.number)

    @property
    def identity(self) -> tuple[str, str, int]:
        """The arguments by which the scripts compare reservations."""
        return self.id, self.mark, self.number

    @property
    def begins(self) -> tuple[str | int, ...]:
        """The arguments of the scripts that begin a task."""
        return *self.identity, self.until, milliseconds(self.ttl)

    @property
    def ends(self) -> tuple[str | int, ...]:
        """The arguments of the scripts that end a task: with "expiry" the key stays reserved."""
        return *self.identity, "stays" if self.until == "expiry" else "end"


Phase = Enum("Phase", "WAITING BEGUN KEPT ENDED")


class OwnReservation:
    """
    The reservation of a delivery's own message, and its phase, which all who deal with it go by.

    Args:
        stated: The reservation, as the message states it; None: it has none.
        tell: Calls the method of :class:`Reservations` with this name; logs an error.

    Attributes:
        stated: The argument of that name.
        phase: WAITING: the lock server was not told that the task begins.  BEGUN: it was.  KEPT: a
            message that comes later has it.  ENDED: nothing is left to be done.
    """

    def __init__(
        self, stated: Reservation | None, tell: Callable[[str, Reservation], None]
    ) -> None:
        self.stated, self._tell = stated, tell
        self.phase = Phase.WAITING

    @property
    def live(self) -> Reservation | None:
        """The reservation, if this delivery has still to end it."""
        return self.stated if self.phase in {Phase.WAITING, Phase.BEGUN} else None

    @property
    def renewed(self) -> Reservation | None:
        """The reservation, if it is renewed with the lease of its task."""
        found = self.live if self.phase is Phase.BEGUN else None
        return found if found and found.until == "end" else None

    def begun(self) -> None:
        """Note that the lock server was told of the task: with "start" nothing is left to end."""
        if self.live is not None:
            self.phase = Phase.ENDED if self.live.until == "start" else Phase.BEGUN

    def keep(self) -> None:
        """Leave it: its message comes again, or another one under the task's id has it."""
        self.phase = Phase.KEPT

    def hand_on(self, lock: str) -> None:
        """
        Give it up: a message was sent under the task's id that has a reservation of this lock.

        A task has one reservation at a time: that of another key is ended.
        """
        if self.live is not None:
            (self.keep if self.live.lock == lock else self.end)()

    def end(self) -> None:
        """End it, if this delivery has still to do so."""
        self.tell("end")
        self.phase = Phase.ENDED

    def tell(self, what: str) -> None:
        """Tell the lock server what becomes of the message, if this delivery has still to."""
        if self.live is not None:
            self._tell(what, self.live)


NO_RESERVATION = OwnReservation(None, lambda *_: None)  # its phase says nothing


class Reserved(NamedTuple):
    """A key was reserved.

    Attributes:
        burst: Seconds since the first of the messages that this one is about to replace.
        mark: See :class:`Reservation`.
        number: See :class:`Reservation`.
    """

    burst: float
    mark: str
    number: int


class Taken(NamedTuple):
    """A key is reserved for another message.

    Attributes:
        id: Id of its task, as reserved_name() writes it.
        is_sent: Whether the message was sent; if not, its sender is about to, or has died.
        has_result: Whether the result of its task is stored.
    """

    id: str
    is_sent: bool
    has_result: bool = True


class Reservations:
    """
    The reservations on a lock server.

    A method blocks for a round trip.  All methods are safe to call from many threads or greenlets.

    Args:
        server: The lock server.
    """

    def __init__(self, server: Server) -> None:
        self._server = server

    def reserve(
        self,
        wanted: Reservation,
        nonce: str,
        *,
        replaces: bool = False,
        due_in: float | None = None,
        has_result: bool = True,
        is_known: bool = False,
        again: bool = False,
    ) -> Reserved | Taken | None:
        """
        Reserve a key for a message that is about to be sent.

        Args:
            wanted: The reservation.  It ends after its ``ttl`` if it is not confirmed.
            nonce: Random text for this message; two calls with the same one are one.
            replaces: Whether the newest message counts, and not the first.
            due_in: With *replaces*, seconds until the message is due: then the one that is due
                first counts, by more than a second.  None: the newest.
            has_result: Whether the result of the task is stored.
            is_known: Whether its sender has chosen the task's id, and may ask for it.
            again: Whether the message is sent again, as a retry, with the mark and the number that
                it has.

        Returns:
            None: a later release has reserved the key, in a format that is not known here.

        Raises:
            StoreError: The server did not answer.  The key may be reserved.
        """
        (done, *answer), _ = self._server.exchange(
            RESERVE,
            [wanted.lock + UNIQUE],
            *(wanted.id, milliseconds(wanted.ttl), int(replaces)),
            "" if due_in is None else milliseconds(due_in),
            *(nonce, int(has_result), int(is_known)),
            *((wanted.mark, wanted.number) if again else ()),
        )
        if done == 1:
            burst_ms, mark, number = answer
            return Reserved(burst_ms / 1000, decode(mark), number)
        if not answer:
            return None
        task_id, state, result = answer
        return Taken(decode(task_id), state != b"s", result == b"1")

    def confirm(self, reservation: Reservation) -> bool:
        """
        Keep a reservation for its ``ttl`` from now, as its message has been sent.

        Messages that this one replaces end when they come.

        Returns:
            False if the key is not reserved for this message any more.

        Raises:
            StoreError: The server did not answer.
        """
        call = (*reservation.identity, milliseconds(reservation.ttl), 0)
        return bool(self._server.exchange(CONFIRM, [reservation.lock + UNIQUE], *call)[0])

    def keep(self, reservations: Sequence[Reservation], *, runs: bool, within: float) -> None:
        """
        Keep reservations for the time that each states, in one pipelined round trip.

        Args:
            reservations: The reservations.
            runs: Whether their tasks run; if not, their messages wait.
            within: Seconds to connect if no connection is idle, and for each reply.

        Raises:
            StoreError: The server did not answer.
        """
        calls = [
            (kept.lock + UNIQUE, *kept.identity, milliseconds(kept.ttl), int(runs))
            for kept in reservations
        ]
        self._server.run_many(CONFIRM, calls, within=within)

    def begin(self, reservation: Reservation, *, elsewhere: bool = False) -> None:
        """
        Begin a task whose message was reserved, if the acquisition of its lock did not.

        Its reservation ends, or is kept while the task runs, as its sender wanted.

        Args:
            reservation: The reservation.
            elsewhere: Whether the reservation is not beside the task's own locks.  Then one that is
                gone is not made again.

        Raises:
            Replaced: The task must not run.
            StoreError: The server did not answer.
        """
        key = reservation.lock + UNIQUE
        by = self._server.run(BEGIN, [key], *reservation.begins, int(elsewhere))
        if by is not None:
            raise Replaced(decode(by))

    def begin_unlocked(self, reservation: Reservation) -> None:
        """
        Begin a task where locks are off: it runs even if its message was replaced.

        Raises:
            StoreError: The server did not answer.
        """
        with suppress(Replaced):
            self.begin(reservation._replace(ttl=OFF_FOR), elsewhere=True)

    def end(self, reservation: Reservation) -> bool:
        """
        End a reservation; with ``until="expiry"`` note that its task has ended.

        Returns:
            False if the key was not reserved for this message.

        Raises:
            StoreError: The server did not answer.
        """
        return self._end(reservation, *reservation.ends)

    def end_waiting(self, reservation: Reservation) -> bool:
        """End a reservation as :meth:`end` does, but only if its task does not run."""
        return self._end(reservation, *reservation.ends, 1)

    def _end(self, reservation: Reservation, *how: str | int) -> bool:
        return bool(self._server.run(UNRESERVE, [reservation.lock + UNIQUE], *how))
