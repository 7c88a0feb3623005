"""One delivery of a task to this process: what came, and what it holds until it is over.

Made once, when the guard is entered, and passed along.  It is the only thing of ours on Celery's
request, under the name ``dislock``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery_dislock.messages.headers import Notes, forget_notes
from celery_dislock.messages.resend import result_is_ignored
from celery_dislock.reporting import told

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery import Task
    from celery.app.task import Context

    from celery_dislock.config.options import TaskOptions
    from celery_dislock.locks.attempt import Attempt
    from celery_dislock.locks.lease import Lease
    from celery_dislock.locks.lock import Lock
    from celery_dislock.messages.outbox import Outbox


class Delivery:
    """
    One delivery of a task.

    Args:
        task: The task.
        request: Celery's request.
        lock: The task's lock, for these arguments.
        attempt: The attempt by which it asks for the lock.
        notes: What its message notes.

    Attributes:
        options: The task's options, as they hold for this delivery.
        outbox: What its body sends under its own id; None while no body runs.
        ticket: Names this delivery's work in the line of a lock; empty: it cannot be parked.
        settles: Seconds for its result, in which its broker may deliver it again.
        was_parked: Whether this was the turn of a parked task.
        began: Whether the body was entered.
        completed: Whether the work is done: this delivery of it does not come again.
        leaves: Whether the lease is left to expire instead of being released.
        at_least: Seconds since its acquisition for which the lease is held; None: as the options
            say.
        after_result: Called with the state once the result is stored and what follows is sent.
    """

    __slots__ = (
        "after_result",
        "at_least",
        "attempt",
        "began",
        "completed",
        "leaves",
        "lock",
        "notes",
        "options",
        "outbox",
        "request",
        "settles",
        "task",
        "ticket",
        "was_parked",
    )

    def __init__(
        self, task: Task, request: Context, lock: Lock, attempt: Attempt, notes: Notes
    ) -> None:
        self.task = task
        self.request = request
        self.lock = lock
        self.attempt = attempt
        self.notes = notes
        self.options: TaskOptions = lock.options
        self.outbox: Outbox | None = None
        self.ticket = ""
        self.settles = 0.0
        self.was_parked = False
        self.began = False
        self.completed = False
        self.leaves = False
        self.at_least: float | None = None
        self.after_result: list[Callable[[str], None]] = []

    @staticmethod
    def of(request: Context) -> Delivery | None:
        """Return the delivery of a request; None if no guard was entered for it."""
        delivery: Delivery | None = getattr(request, "dislock", None)
        return delivery

    @property
    def id(self) -> Any:
        """The task's id."""
        return self.request.id

    @property
    def is_eager(self) -> bool:
        """Whether the task is applied here and now, without a message."""
        return bool(self.request.is_eager)

    @property
    def result_is_ignored(self) -> bool:
        """Whether nobody wants to know what becomes of it."""
        return result_is_ignored(self.task, self.request)

    @property
    def lease(self) -> Lease | None:
        """The lease under which it runs; None if it has none."""
        return self.attempt.lease

    def told(self, error: Any, what: str, **kwargs: Any) -> Any:
        """Log how the delivery ends, in the one line about *error*; returns the error."""
        return told(error, self.task.name, self.id, what, **kwargs)

    def forget_notes(self) -> None:
        """Take the notes off: the lock is had, and what follows is a wait of its own."""
        self.notes = Notes()
        forget_notes(self.request)

    def settle(self) -> None:
        """End the lease, if there is one; does nothing the second time."""
        done = self.completed
        self.attempt.end(
            leaves=self.leaves,
            at_least=self.at_least,
            ticket=self.ticket if done else "",
            settles=self.settles if done else 0.0,
        )

    def __str__(self) -> str:
        return f"{self.task.name}[{self.id}]"
