"""What a task does that comes second: one function for each strategy.

Each either returns a lease, because the task has waited for it, or ends the delivery with an
exception of Celery's or ours.  Whatever it does, a caller's ``get()`` ends, or goes on waiting for
a task that is still to run; chords and chains are told.
"""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import celery
from celery import states
from celery.exceptions import Ignore, Reject, Retry, TaskRevokedError

from celery_dislock import signals
from celery_dislock.exceptions import DamagedLockError, SettingsError
from celery_dislock.keys.names import task_name
from celery_dislock.locks.claim import Conflict, in_words
from celery_dislock.messages.headers import OWNERS_MOST, notes_of
from celery_dislock.messages.resend import put_off, result_is_ignored
from celery_dislock.parking.store import Bounds
from celery_dislock.reporting import told
from celery_dislock.servers.replies import Full

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery import Task
    from celery.app.task import Context

    from celery_dislock.config.options import TaskOptions
    from celery_dislock.exceptions import StoreError
    from celery_dislock.locks.lease import Lease

CELERY_FAILS_REJECTED = celery.VERSION[:2] >= (5, 7)  # older ones leave their callers waiting

DAMAGED_TRIES = 5  # times a task is put off before it fails for a damaged lock: half a minute

logger = logging.getLogger("celery_dislock")


class Second(NamedTuple):
    """A delivery whose lock is held."""

    task: Task
    request: Context
    options: TaskOptions
    conflict: Conflict
    wait_in_line: Callable[[float], Lease | Conflict | None]  # given so many seconds
    park: Callable[[Conflict, Bounds], Lease | Conflict | Full | None] | None = None

    @property
    def is_a_copy(self) -> bool:
        """Whether the lock is held by another delivery of this very task."""
        holder, task_id = self.conflict.holder, self.request.id
        mine = task_name(task_id) if "parked" in holder else task_id
        return holder.get("id") == mine and not self.request.is_eager


def resolve(second: Second) -> Lease | None:
    """
    Do as ``lock_on_conflict`` says.

    A copy of the task that holds the lock is put off, whatever that says: after a dead worker or a
    lost connection it may be the only copy of that work.

    Raises:
        Ignore: Skipped, and the result says REVOKED and why; or a copy, which comes again later.
        LockHeldError: The task fails.
        Retry: The task comes again later.
        Reject: The broker gets the message back.
        SettingsError: A callable has returned what is no strategy.
    """
    task, request, options, conflict = second.task, second.request, second.options, second.conflict
    signals.lock_conflict.send(sender=task, conflict=conflict, task_id=request.id)
    if second.is_a_copy:
        put_off_copy(second)
    chosen = options.lock_on_conflict
    if not isinstance(chosen, str):
        chosen = _ask(chosen, second)
    return STRATEGIES[chosen](second)


def skip(second: Second) -> NoReturn:
    """Do not run; the result is REVOKED, which a chord and the rest of a chain are told."""
    end_unrun(second.task, second.request, str(second.conflict.error()))


def end_unrun(task: Task, request: Context, reason: str) -> NoReturn:
    """Do not run; the result is REVOKED, and says why; raises Ignore."""
    if not request.is_eager:
        _end(task, request, TaskRevokedError(reason), states.REVOKED)
    raise told(Ignore(reason), task.name, request.id, f"skipped: {reason}. It does not run.")


def fail(second: Second) -> NoReturn:
    """Fail, with the holder in the error."""
    raise second.conflict.error()


def retry(second: Second) -> NoReturn:
    """Come again later, until ``lock_retry_for`` is over; an eager task cannot, and fails."""
    task, request, options, conflict = second.task, second.request, second.options, second.conflict
    now = time.time()  # of this machine, as Celery's ETA is, and the headers of a message carry it
    notes = notes_of(request)
    until = notes.retry_until = min(notes.retry_until or math.inf, now + options.lock_retry_for)
    error = conflict.error()
    if request.is_eager or now >= until:
        raise error
    at_most = min(conflict.remaining, until - now)
    delay = put_off(task, request, str(error), at_most=at_most)
    _retried(task, request, error, delay)


def wait(second: Second) -> Lease | None:
    """Wait in line, in this slot; after ``lock_wait_timeout`` fail."""
    answer = second.wait_in_line(second.options.lock_wait_timeout)
    if not isinstance(answer, Conflict):
        return answer
    late = second._replace(conflict=answer)
    if late.is_a_copy:  # another got its turn first
        put_off_copy(late)
    fail(late)


def queue(second: Second) -> Lease | None:
    """Wait in line without a slot; an eager task cannot, nor one that needs several locks."""
    options = second.options
    if second.park is None:
        fail(second)
    bounds = Bounds(
        options.lock_queue_limit or 0, options.lock_queue_bytes, options.lock_queue_overflow
    )
    answer = second.park(second.conflict, bounds)
    if answer is None:  # its message was not kept
        retry(second)
    if isinstance(answer, Full):
        reason = f"the line for lock {second.conflict.key!r} is full: {answer.waiting} wait in it"
        end_unrun(second.task, second.request, reason)
    if isinstance(answer, Conflict):
        put_off_copy(second._replace(conflict=answer))
    return answer


def reject(second: Second) -> NoReturn:
    """Give the message back for good: to the dead-letter exchange, where its queue has one."""
    task, request, conflict = second.task, second.request, second.conflict
    rejection = Reject(str(conflict.error()), requeue=False)
    if not request.is_eager and not CELERY_FAILS_REJECTED:
        _end(task, request, rejection, states.FAILURE, call_errbacks=True)
    what = f"rejected: {conflict.error()}. Its message goes to the dead-letter exchange, if any."
    raise told(rejection, task.name, request.id, what)


STRATEGIES: dict[str, Callable[[Second], Lease | None]] = {
    "skip": skip,
    "raise": fail,
    "retry": retry,
    "wait": wait,
    "queue": queue,
    "reject": reject,
}


def _ask(decide: Callable[[Task, Conflict], str | None], second: Second) -> str:
    """Let a callable choose; a predicate that leaves a caller waiting becomes a strategy."""
    try:
        chosen = decide(second.task, second.conflict)
    except Ignore:
        return "skip"
    except Reject as exc:
        if exc.requeue:
            raise
        return "reject"
    except Retry as exc:
        if exc.sig is not None:  # task.retry() has sent it
            raise
        return "retry"
    if chosen is None:
        return "skip"
    if chosen not in STRATEGIES:
        allowed = ", ".join(map(repr, STRATEGIES))
        raise SettingsError(
            second.task.name, "lock_on_conflict", chosen, f"return None or one of {allowed}"
        )
    return chosen


def put_off_copy(second: Second) -> NoReturn:
    """Send a copy of a task that runs again for later; the result belongs to the one that runs."""
    task, request, conflict = second.task, second.request, second.conflict
    reason = (
        f"another delivery of this task holds lock {conflict.key!r}: {in_words(conflict.holder)}"
    )
    # A parked task's turn that came late was given twice: nothing to worry about.
    level = logging.WARNING if notes_of(request).parked is None else logging.INFO
    delay = put_off(task, request, reason, at_most=conflict.remaining)
    what = f"put off for {delay:.1f} s: {reason}"
    raise told(Ignore(reason), task.name, request.id, what, level=level)


def unavailable(
    task: Task, request: Context, key: str, error: StoreError, choice: str, owner: str | None
) -> None:
    """
    Do as ``dislock_on_unavailable`` says where the lock server does not answer.

    It may still carry out what it was sent, and grant the lock to *owner*, whom nobody waits for
    any more: the next delivery ends that lease before it asks for its own.  None: it was not asked.

    Returns:
        Where the body is to run without its lock.

    Raises:
        Retry: Put off, and nothing is lost.
        StoreError: The task fails; so does an eager one, which has nowhere to be put, and one whose
            lock is damaged, after some tries.
    """
    if choice == "run":
        logger.warning(
            "Task %s[%s] runs without its lock %r: %s", task.name, request.id, key, error
        )
        return
    damaged = isinstance(error, DamagedLockError) and notes_of(request).put_off >= DAMAGED_TRIES
    if choice == "raise" or damaged or request.is_eager:
        raise error
    if owner is not None:
        notes = notes_of(request)
        notes.given_up = [*notes.given_up, owner][-OWNERS_MOST:]
    reason = f"lock {key!r} cannot be had: {error}"
    delay = put_off(task, request, reason)
    _retried(task, request, error, delay, reason)


def _retried(
    task: Task, request: Context, error: Exception, delay: float, reason: str = ""
) -> NoReturn:
    """End a delivery that comes again later."""
    retry = Retry(str(error), exc=error, when=delay)
    what = f"put off for {delay:.1f} s: {reason or error}"
    raise told(retry, task.name, request.id, what)


def _end(
    task: Task, request: Context, error: Exception, state: str, *, call_errbacks: bool = False
) -> None:
    """Store the result, and tell the chord and the rest of the chain; Ignore alone tells nobody."""
    task.backend.mark_as_failure(
        request.id,
        error,
        request=request,
        store_result=not result_is_ignored(task, request),
        call_errbacks=call_errbacks,
        state=state,
    )
