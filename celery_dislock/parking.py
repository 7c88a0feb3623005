"""Park a task in line for its lock instead of in a worker slot, and claim its turn.

Where a task cannot have its lock, its message is kept in Redis, in line, and acknowledged.  Whoever
releases the lock publishes the message of the first in line again, with its ticket in a header, and
the lock is reserved for it: the worker that gets it claims its turn and runs it.

A ticket belongs to one delivery of work: task id, number of retries, and how often the task was
replaced.  What a body retries or replaces is new work, whatever headers Celery copies.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from celery.exceptions import Ignore

from celery_dislock.answers import Done, Full, Parked
from celery_dislock.claims import Conflict, in_words
from celery_dislock.exceptions import StoreError
from celery_dislock.lines import UNBOUNDED, Bounds, Ticket
from celery_dislock.messages import Message, TaskParked
from celery_dislock.reporting import told
from celery_dislock.sending import TICKET_HEADER, result_is_ignored, ticket_note

if TYPE_CHECKING:
    from celery import Task
    from celery.app.task import Context

    from celery_dislock.claims import Claim
    from celery_dislock.leases import Lease
    from celery_dislock.locks import Lock
    from celery_dislock.runtime import Process

PARKED = "PARKED"  # state of the result while a task is in line

logger = logging.getLogger("celery_dislock")


class Parking:
    """
    What one delivery has to do with the line for its lock.

    Args:
        task: The task.
        request: The delivery.
        lock: The lock, of one key.
        claim: Who asks.
        process: What the locks of this process share.
    """

    def __init__(
        self, task: Task, request: Context, lock: Lock, claim: Claim, process: Process
    ) -> None:
        self._task = task
        self._request = request
        self._lock = lock
        self._claim = claim
        self._process = process
        self._lines = process.lines
        nesting = request.replaced_task_nesting or 0
        self._ticket = f"{request.id}:{request.retries}:{nesting}"
        claim.ticket = self._ticket
        claim.settles = lock.timeout if task.acks_late else 0.0

    def ask(self) -> Lease | Conflict:
        """
        Take the lock, or claim this task's turn; nothing is parked yet.

        Raises:
            Ignore: The task is in line already, or this is a copy of work that is done.
            StoreError: The lock server did not answer.
        """
        answer = self._answer()
        assert not isinstance(answer, Full)  # noqa: S101 -- nobody asked for room
        return answer

    def park(self, conflict: Conflict, bounds: Bounds) -> Lease | Conflict | Full | None:
        """
        Put the task in line, unless the lock can be had after all.

        The state PARKED is stored first: once in line the task may have run and ended before
        anything else is done here.

        Args:
            conflict: Why it cannot run now.
            bounds: Of the line.

        Returns:
            The lease; or that there is no room; or the conflict with a copy of this task, which
            runs; or None where the message was not kept, so that nothing can be parked.

        Raises:
            TaskParked: It is in line.
            StoreError: The lock server did not answer; it may be in line all the same.
        """
        message = Message.of(self._request)
        if message is None:
            return None
        place = min(conflict.place, bounds.most or conflict.place)
        self._store_state(conflict, place)
        self._lines.enlist(self._lock.names[0])
        return self._answer(message.to_bytes(), bounds)

    def settled(self) -> None:
        """
        Note that the work of a parked task is done: its result is stored, and what follows is sent.

        A task that is acknowledged before it runs was done with its release.
        """
        claim = self._claim
        if claim.claimed and claim.completed and claim.settles:
            try:
                self._process.store.release(self._lock.names, claim.owner, ticket=self._ticket)
            except StoreError as exc:
                logger.warning(
                    "Task %s[%s] has ended, but a copy of it may run again: %s",
                    self._task.name,
                    self._request.id,
                    exc,
                )

    def _answer(self, message: bytes = b"", bounds: Bounds = UNBOUNDED) -> Lease | Conflict | Full:
        lock, task, request = self._lock, self._task, self._request
        ticket = Ticket(self._ticket, f"{request.id}@", self._is_marked(), message)
        with self._process.log_order.parking(self._ticket):
            answer = lock.park(self._claim, self._lines, ticket, bounds)
            if isinstance(answer, Parked):
                parked = TaskParked(lock.key, answer.place, in_words(answer.conflict.holder))
                told(parked, task.name, request.id, f"{parked}.")
        if isinstance(answer, Parked):
            self._process.tell_replaced(lock.names[0], answer.replaced)
            raise parked
        if isinstance(answer, Done):
            reason = f"it has run under lock {lock.key!r} before"
            raise told(Ignore(reason), task.name, request.id, f"acknowledged unrun: {reason}.")
        return answer

    def _is_marked(self) -> bool:
        """Tell whether the message says that its task was parked in this line."""
        lock, ticket = ticket_note(self._request) or ("", "")
        if ticket != self._ticket:
            return False
        if lock == self._lock.names[0]:
            return True
        # Parked before its key was declared in another way: it has its turn there, and asks here.
        if self._lines.leave(lock, ticket):
            self._request.headers.pop(TICKET_HEADER)
            return False
        return True  # done there

    def _store_state(self, conflict: Conflict, place: int) -> None:
        task, request = self._task, self._request
        if result_is_ignored(task, request):
            return
        meta = {
            "key": conflict.key,
            "place": place,
            "holder": in_words(conflict.holder),
        }
        try:
            task.backend.store_result(request.id, meta, PARKED, request=request)
        except Exception as exc:  # noqa: BLE001 -- whichever the backend's client has
            logger.warning(
                "Task %s[%s] is parked, and its result does not say so: %s",
                task.name,
                request.id,
                exc,
            )
