"""Park a task in line for its lock instead of in a worker slot, and claim its turn.

If a task's lock is held, its message is stored in line in Redis and acknowledged.  The process that
releases the lock reserves the lock for the first task in line.  It then publishes that task's
message again, with the ticket in a header.  The worker that gets the message claims the turn and
runs the task.

A ticket names one piece of work by task id, number of retries, and number of replacements.  A retry
or replacement is new work with a ticket of its own, even though Celery copies the headers.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, NoReturn

from celery_dislock.exceptions import LaterReleaseError, StoreError
from celery_dislock.keys.names import ticket_of_request
from celery_dislock.keys.templates import key_of
from celery_dislock.locks.lease import WAS_PARKED
from celery_dislock.messages.headers import SENT, SINCE
from celery_dislock.messages.message import TaskParked, result_is_ignored
from celery_dislock.messages.unrun import acknowledge, put_off
from celery_dislock.parking.answers import PARKED, Done, Later, Parked
from celery_dislock.parking.store import OVER, UNBOUNDED, Bounds, Ticket
from celery_dislock.redaction import reason_of
from celery_dislock.servers.records import Conflict, in_words, is_turn
from celery_dislock.servers.replies import Granted
from celery_dislock.servers.requests import Ending, LateRelease
from celery_dislock.words import so_far

if TYPE_CHECKING:
    from celery_dislock.locks.lease import Lease
    from celery_dislock.messages.delivery import Delivery
    from celery_dislock.parking.process import ParkingProcess
    from celery_dislock.parking.store import Lines

LATER_MOST = 86400.0  # seconds for which a task waits for a worker of a later release

logger = logging.getLogger("celery_dislock")


class Parking:
    """
    Parks one delivery, or claims its turn.

    Args:
        delivery: The delivery.
        process: The store and the lines of this process.
    """

    def __init__(self, delivery: Delivery, process: ParkingProcess) -> None:
        self._delivery, self._process = delivery, process
        self._ticket = ticket_of_request(delivery.request)
        # A task that is acknowledged late may be redelivered until its result is stored.
        settles = delivery.lock.timeout if delivery.task.acks_late else 0.0
        delivery.if_done = Ending(ticket=self._ticket, settles=settles)

    def ask(self, message: bytes = b"", bounds: Bounds = UNBOUNDED) -> Lease | Conflict:
        """
        Take the lock, or claim this task's turn; otherwise park the task if there is a *message*.

        Raises:
            TaskParked, Ignore: The task is in line, or this is a copy of work that is done.
            StoreError: The lock server did not answer.
        """
        delivery, lock, attempt = self._delivery, self._delivery.lock, self._delivery.attempt
        ticket = Ticket(
            self._ticket,
            marked=delivery.notes.parked is not None,
            message=message,
            task=delivery.sent_to,
            terms=lock.terms,
            heeded=delivery.heeded,
            bounds=bounds,
            reservation=None if attempt.reservation is None else attempt.reservation.live,
            sent=delivery.notes.sent,
        )
        asked_at = lock.clock()
        if attempt.asked_at is None:
            attempt.asked_at = asked_at
        answer = self._process.lines.park(
            lock.names, attempt.owner, lock.timeout, attempt.holder_json, ticket
        )
        if isinstance(answer, Parked):
            holder, held_for = in_words(answer.holder), answer.held_for
            #: INFO `Task … parked: place … in line for lock …, held by …, for … so far.`: A
            #: conflict, with "queue" or "cancel". If only a rate is in the way: `its turn … comes
            #: in … s`.
            parked = TaskParked(f"parked: {_where(answer)}")
            since = {} if held_for is None else {"held_for": held_for}
            parked.about = {"key": answer.key, "place": answer.place, "holder": holder, **since}
            delivery.logged(parked, f"{parked}.")
            if answer.replaced:
                tell = self._process.publisher.tell_replaced
                parked.replaced = tell(lock.names[0], answer.replaced, str(delivery.id))
            parked.told = answer.told
            raise parked
        if isinstance(answer, Done):
            self._end_copy()
        if isinstance(answer, Granted):
            if answer.claimed and delivery.if_done.settles:
                delivery.after_result.append(self._result_stored)
            if answer.claimed and ticket.marked:
                attempt.how = WAS_PARKED
            if answer.locks != lock.names:
                lock.adopt_ticket_keys(answer.locks)
            return lock.keep(attempt, answer.tokens, asked_at, lock.timeout, begun=True)
        if isinstance(answer, Later):
            put_off_later(delivery, self._process.lines)
        return answer

    def _end_copy(self) -> NoReturn:
        """Acknowledge a copy of work that is done; raises Ignore."""
        delivery = self._delivery
        # One that did not come before was sent anew, under the same id.
        if delivery.came_before and delivery.reservation is not None:
            delivery.reservation.keep()  # a retry has the same
        #: INFO `Task … acknowledged unrun: it has run under lock … before.`: A second copy of a
        #: parked task, or of one that has ended. -> If it comes often, the workers of its queue
        #: take longer than a turn lasts.
        acknowledge(delivery, f"it has run under lock {delivery.lock.key!r} before")

    def park(self, conflict: Conflict, bounds: Bounds) -> Lease | Conflict:
        """
        Park the task, or take the lock if it has become free.

        Stores the state PARKED first.  Once the task is in line, another worker may run it and
        store its result at any moment, and PARKED must not overwrite that result.

        Args:
            conflict: The conflict because of which the task is parked.
            bounds: Limits of the line.

        Returns:
            The lease, if the lock was free; the conflict, if another delivery of this task runs or
            is storing its result; or Full, if the line has no room.

        Raises:
            TaskParked: The task is in line.
            StoreError: The lock server did not answer.  The task may be in line.
        """
        delivery = self._delivery
        notes = {SINCE: delivery.notes.since}
        if delivery.notes.sent:
            notes[SENT] = delivery.notes.sent
        message = delivery.message.to_bytes(notes)
        if not result_is_ignored(delivery.task, delivery.request):
            self._store_state(conflict, min(conflict.place, bounds.most or conflict.place))
        try:
            return self.ask(message, bounds)
        except StoreError:  # it may be in line, so its next delivery asks there, as at its turn
            delivery.notes.parked = delivery.lock.names[0], self._ticket
            raise

    def _store_state(self, conflict: Conflict, place: int) -> None:
        delivery = self._delivery
        meta = {"key": conflict.key, "place": place, "holder": in_words(conflict.holder)}
        if len(delivery.lock.names) > 1:
            meta["first"] = key_of(delivery.lock.names[0])  # which has its ticket
        try:
            delivery.task.backend.store_result(delivery.id, meta, PARKED, request=delivery.request)
        except Exception as exc:  # noqa: BLE001 -- any of the backend's client
            #: WARNING: The result backend is away. -> Repair it.
            logger.warning(
                "Task %s is parked, and its result does not say so: %s", delivery, reason_of(exc)
            )

    def _result_stored(self, _state: str) -> None:
        """
        Set a parked task's done-mark, after its result is stored and its callbacks are sent.

        The mark of a task that is acknowledged early was set by the release.
        """
        delivery, ending = self._delivery, self._delivery.ending
        if not (ending.ticket and (ending.settles or 0) > 0):
            return
        done = LateRelease(
            delivery.lock.names, delivery.attempt.owner, Ending(ticket=ending.ticket)
        )
        try:
            self._process.store.release(*done)
        except StoreError as exc:
            # Not by the owner, of whom a release may wait that says for how long its lease stays.
            self._process.watchdog.clear(done._replace(owner=ending.ticket))
            #: WARNING: The mark of a task that ran could not be set; it is set within seconds of
            #: the server's return, unless the process ends before. -> Check the lock server, if the
            #: task must not run twice.
            logger.warning(
                "Task %s has ended, and a copy of it may run again until the lock server answers: "
                "%s",
                *(delivery, exc),
            )


def _where(parked: Parked) -> str:
    """Tell a parked task's place in line, or that it has its turn."""
    lock, holder = f"lock {parked.key!r}", in_words(parked.holder)
    if not parked.place and parked.early:
        return f"its turn for {lock} comes in {parked.remaining:.1f} s, {holder}"
    if not parked.place and is_turn(parked.holder):
        return f"it has its turn for {lock}"
    held = holder if parked.early else f"held by {holder}{so_far(parked.held_for)}"
    return f"place {parked.place} in line for {lock}, {held}"


def put_off_later(delivery: Delivery, lines: Lines) -> NoReturn:
    """
    Put off a task whose turn, or whose lease, was written by a later release of this package.

    Raises:
        Ignore: The task was put off, for a worker of that release.
        LaterReleaseError: The task was put off for a day in vain, and fails.  It leaves its line
            when the result is stored.
    """
    notes, now = delivery.notes, time.time()
    notes.later = notes.later or now
    error = LaterReleaseError(delivery.lock.key)
    if now - notes.later <= LATER_MOST:
        #: WARNING `Task … put off for … s: what this task has of lock … was written by a later
        #: release of celery-dislock`: A newer worker has parked it, or kept its lock for a retry;
        #: it fails after 24 hours. -> Update this worker.
        put_off(delivery, str(error), level=logging.WARNING)
    if turn := notes.parked:
        out = turn, error, delivery.sent_to, OVER
        delivery.after_result.append(lambda _state: lines.take_out(*out))
    raise error
