"""How a task's body has ended, and what that means for its lock and its message."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from celery.exceptions import Ignore, Reject, Retry

from celery_dislock.servers.requests import DEAD_LETTERED, RELEASED

if TYPE_CHECKING:
    from celery import Task

    from celery_dislock.servers.requests import Ending


class Outcome(NamedTuple):
    """
    How a body has ended, and what that means for its lock.

    Attributes:
        done: Whether the task's work is done, so that its message is not expected again.
        released_by: Option that says whether the lock is released, or left to expire; empty: the
            lock is released in any case.
        rejected: Whether the body has rejected its message.
    """

    done: bool
    released_by: str = ""
    rejected: bool = False

    def ending(self, if_done: Ending, task: Task) -> Ending:
        """
        Return how the lease ends, given its ending if the work is done.

        A message that is acknowledged late and rejected may be dead-lettered by its broker, and
        brought back by a rule or by an operator.  Then it is no copy of work that is done.
        """
        rejected = self.rejected
        if self == FAILED:
            # Before 5.7 Celery has the second option alone.
            rejected = not getattr(task, "acks_on_failure", task.acks_on_failure_or_timeout)
        if rejected and task.acks_late and if_done.ticket:
            return if_done._replace(settles=DEAD_LETTERED)
        return if_done if self.done else RELEASED


SUCCEEDED = Outcome(done=True, released_by="release_on_success")
FAILED = Outcome(done=True, released_by="release_on_failure")
ENDED_EARLY = Outcome(done=True)  # by one of Celery's predicates
REJECTED = Outcome(done=True, rejected=True)
COMES_AGAIN = Outcome(done=False)
STOPPED = Outcome(done=False, released_by="release_on_failure")  # stopped with its worker


def outcome_of(error: BaseException) -> Outcome:
    """Return the outcome of a body that has raised an exception."""
    if isinstance(error, Reject):
        return COMES_AGAIN if error.requeue else REJECTED
    if isinstance(error, (Retry, Ignore)):
        return ENDED_EARLY
    return FAILED if isinstance(error, Exception) else STOPPED
