"""How a task's body has ended, and what that means for its lock and its message."""

from __future__ import annotations

from typing import NamedTuple

from celery.exceptions import Ignore, Reject, Retry


class Outcome(NamedTuple):
    """
    How a body has ended, and what that means for its lock.

    Attributes:
        done: Whether the task's work is done, so that its message is not expected again.
        released_by: Option that says whether the lock is released, or left to expire; empty: the
            lock is released in any case.
    """

    done: bool
    released_by: str = ""


SUCCEEDED = Outcome(done=True, released_by="release_on_success")
FAILED = Outcome(done=True, released_by="release_on_failure")
ENDED_EARLY = Outcome(done=True)  # by one of Celery's predicates
COMES_AGAIN = Outcome(done=False)
STOPPED = Outcome(done=False, released_by="release_on_failure")  # stopped with its worker


def outcome_of(error: BaseException) -> Outcome:
    """Return the outcome of a body that has raised an exception."""
    if isinstance(error, Reject) and error.requeue:
        return COMES_AGAIN
    if isinstance(error, (Retry, Ignore, Reject)):
        return ENDED_EARLY
    return FAILED if isinstance(error, Exception) else STOPPED
