"""What a task does if its lock is held: one function for each strategy.

A strategy returns the lease after the task has waited for it, or ends the delivery with an
exception of Celery's or ours.  It returns None if the lock server is away and the body runs without
its lock.

With every strategy, a caller's ``get()`` ends, or waits for a task that will still run.  Chords and
chains are notified.
"""

from __future__ import annotations

import logging
import math
import time
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NoReturn

import celery
from celery import states
from celery.exceptions import Ignore, Reject, Retry

from celery_dislock.config.options import IN_LINE
from celery_dislock.exceptions import SettingsError
from celery_dislock.keys.names import shown_id, task_id_of_reserved
from celery_dislock.locks.interruption import THROWN
from celery_dislock.messages.message import TaskParked, store_end
from celery_dislock.messages.unrun import (
    PUT_OFF_FIRST,
    acknowledge,
    put_off,
    skip,
)
from celery_dislock.parking.answers import Full
from celery_dislock.parking.store import OVER, Bounds
from celery_dislock.servers.records import Conflict, in_words, is_turn
from celery_dislock.signals import lock_conflict
from celery_dislock.tasks.cancelling import replaced_by, tell_workers
from celery_dislock.words import so_far

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery import Task

    from celery_dislock.exceptions import LockHeldError
    from celery_dislock.locks.lease import Lease
    from celery_dislock.messages.delivery import Delivery
    from celery_dislock.parking.process import ParkingProcess
    from celery_dislock.servers.replies import Replaced
    from celery_dislock.tasks.acquisition import Acquisition

WARNED_MOST = 1000  # tasks and keys that are remembered as warned of
SENT_BY_HOLDER = (
    "the task that holds the lock has sent the task that asks for it: if the body of the first "
    "waits for the result of the second, it waits for itself: the lock is released after the body"
)
# Newer versions of Celery store FAILURE for a rejected task; in older ones get() waits forever.
CELERY_FAILS_REJECTED = celery.VERSION[:2] >= (5, 7)

logger = logging.getLogger("celery_dislock")


def resolve(asking: Acquisition, conflict: Conflict) -> Lease | None:
    """
    Apply ``lock_on_conflict``.

    With any strategy, a copy of the task that holds the lock is put off instead.  After a dead
    worker or a lost connection, the copy may be the only message left of that work.

    Raises:
        Ignore: The task is skipped and its result is REVOKED with the reason; or the task is
            parked; or the delivery is a copy, and is put off or acknowledged unrun.
        LockHeldError: The task fails.
        Retry: The task was put off.
        Reject: The message goes back to the broker.
        SettingsError: A callable has returned a value that is not a strategy.
    """
    delivery = asking.delivery
    is_copy = conflict.is_copy and not delivery.is_eager
    if is_copy and conflict.early:  # not a copy: its own turn has come before it may start
        put_off_copy(delivery, conflict)
    lock_conflict.send(sender=delivery.task, conflict=conflict, task_id=delivery.id)
    if is_copy:
        _count(delivery, conflict, "copy")
        put_off_copy(delivery, conflict)
    chosen = delivery.options.lock_on_conflict
    if not isinstance(chosen, str):
        chosen = _ask(chosen, delivery.task, conflict)
    if delivery.notes.since is None:
        delivery.notes.since = time.time()
    if chosen not in IN_LINE:  # these count later, when it is known whether the line is full
        _count(delivery, conflict, chosen)
    return STRATEGIES[chosen](asking, conflict)


def _count(delivery: Delivery, conflict: Conflict, outcome: str) -> None:
    """Tell those who watch what becomes of a task whose lock is held."""
    channel = delivery.lock.channel
    if channel.watched:
        channel.resolved(delivery.attempt, conflict, outcome)


def _error(delivery: Delivery, conflict: Conflict) -> LockHeldError:
    """Make the LockHeldError of a delivery."""
    return conflict.error(_hint(delivery, conflict))


def _hint(delivery: Delivery, conflict: Conflict) -> str:
    """Say that the task which has sent this one holds the lock; empty: it does not."""
    request, holder = delivery.request, conflict.holder.get("id")
    if holder is None or holder == delivery.attempt.holder["id"]:
        return ""
    has_sent = holder in map(shown_id, (request.parent_id, request.root_id))
    return SENT_BY_HOLDER if has_sent else ""


@lru_cache(WARNED_MOST)
def _warn_of_wait(name: str, key: str, hint: str) -> None:
    """Log once that a task may never get its turn."""
    #: WARNING: A task has sent another of its own key, which has its turn when the first has ended.
    #: -> If the first waits for the result in its body, neither ends.
    logger.warning("Tasks %s are parked for lock %r: %s.", name, key, hint)


def _leave_end(delivery: Delivery) -> None:
    """
    Acknowledge a copy that is about to end unrun, if its result says that its task has ended.

    Another end would overwrite that one, and a chord would count one member twice.

    Raises:
        Ignore: The copy is acknowledged.
    """
    backend = delivery.task.backend
    # Reading a result that is sent as a message would consume it.
    if not (delivery.came_before and backend.persistent):
        return
    try:
        state = backend.get_state(delivery.id)
    except THROWN:
        raise
    except Exception:  # noqa: BLE001 -- any of the backend's client; or there are no results
        return
    if state in {states.SUCCESS, states.FAILURE}:
        acknowledge(delivery, f"it has run under lock {delivery.lock.key!r} before")


def _skip(asking: Acquisition, conflict: Conflict) -> NoReturn:
    """Skip the task: store REVOKED, and notify its chord and the rest of its chain."""
    _leave_end(asking.delivery)
    skip(asking.delivery, str(_error(asking.delivery, conflict)))


def end_replaced(delivery: Delivery, replaced: Replaced, process: ParkingProcess) -> NoReturn:
    """End a task whose message was replaced by a newer one of its key; raises Ignore."""
    worker = delivery.attempt.holder["worker"] or ""
    if delivery.options.lock_unique_until is not None:
        delivery.lock.channel.message(delivery.task.name, "replaced", worker)
    newer = task_id_of_reserved(replaced.by)
    reason = replaced_by(delivery.lock.key, newer)
    try:
        if newer == str(delivery.id):  # the result of this id is that of the newer message
            acknowledge(delivery, reason)
        skip(delivery, reason)
    except Ignore:  # the task's end is stored, so the task may give up its place in line
        delivery.ending = delivery.if_done
        if delivery.notes.parked is not None:
            process.lines.take_out(delivery.notes.parked, reason, delivery.sent_to, OVER)
        raise


def fail(asking: Acquisition, conflict: Conflict) -> NoReturn:
    """Fail with a LockHeldError that names the holder."""
    _leave_end(asking.delivery)
    #: ERROR `Task … raised unexpected: LockHeldError(…)`: Of Celery: a conflict with "raise", or
    #: with "wait" or "retry" after their maximum time. -> Allow more time;
    #: `throws=(LockHeldError,)` makes it an INFO line.
    raise _error(asking.delivery, conflict)


def retry(asking: Acquisition, conflict: Conflict) -> NoReturn:
    """Put the task off; fail after ``lock_retry_for``, or at once if the task is eager."""
    delivery = asking.delivery
    now = time.time()  # wall clock, like Celery's ETA: a message header carries the time
    until = min(delivery.notes.retry_until or math.inf, now + delivery.options.lock_retry_for)
    delivery.notes.retry_until = until
    if delivery.is_eager or now >= until:
        fail(asking, conflict)
    error, left = _error(delivery, conflict), until - now
    if conflict.early and conflict.remaining > left:
        fail(asking, conflict)  # at once: the next start comes too late
    at = conflict.remaining if conflict.early else None
    #: INFO `Task … put off for … s: lock … is held by …`: A conflict, with "retry".
    #: INFO `Task … put off for … s: lock … cannot be taken yet, too early: …`: The rate of the
    #: lock is used up, or it is held back. With other strategies the same words stand in place of
    #: the holder.
    put_off(delivery, str(error), at_most=min(conflict.remaining, left), at=at, error=error)


def wait(asking: Acquisition, conflict: Conflict) -> Lease | None:
    """
    Wait in line in this worker slot; fail after ``lock_wait_timeout``, or at once if eager.

    If the lock is reserved for a parked task, whose message may find no other slot, the slot is
    given back: the task is put off for a moment, and its place in line is kept.
    """
    delivery, now = asking.delivery, time.time()
    if delivery.is_eager:
        fail(asking, conflict)
    until = min(delivery.notes.retry_until or math.inf, now + delivery.options.lock_wait_timeout)
    answer = asking.answer(
        partial(delivery.lock.acquire, delivery.attempt, timeout=until - now, gives_way=True)
    )
    if not isinstance(answer, Conflict):
        return answer
    if answer.is_copy:  # another delivery of this task was first
        put_off_copy(delivery, answer)
    if is_turn(answer.holder):
        in_time = time.time() < until
        if in_time and len(delivery.lock.names) == 1:
            delivery.notes.held = [delivery.attempt.owner, *delivery.lock.names]
        else:
            delivery.lock.abandon(delivery.attempt)
        if in_time:
            delivery.notes.retry_until = until
            error = answer.error()
            put_off(delivery, str(error), at_most=PUT_OFF_FIRST, error=error)
    fail(asking, answer)


def queue(asking: Acquisition, conflict: Conflict) -> Lease | None:
    """Park the task; one that has no line, such as an eager one, fails."""
    delivery, options = asking.delivery, asking.delivery.options
    if asking.parking is None:
        _count(delivery, conflict, "raise")
        fail(asking, conflict)
    bounds = Bounds(
        options.lock_queue_limit or 0, options.lock_queue_bytes, options.lock_queue_overflow
    )
    try:
        # may_run=False: the task may be in line already, and would run a second time at its turn.
        answer = asking.answer(partial(asking.parking.park, conflict, bounds), may_run=False)
    except TaskParked as parked:
        if parked.told:
            tell_workers(delivery.task.app, parked.told)
        _count(delivery, conflict, "cancel" if options.cancels else "queue")
        if hint := _hint(delivery, conflict):
            _warn_of_wait(delivery.task.name, conflict.key, hint)
        raise
    if isinstance(answer, Full):
        _count(delivery, conflict, "full")
        #: INFO `Task … skipped: the line for lock … is full: … tasks wait in it.`:
        #: `lock_queue_limit` or `lock_queue_bytes` is reached. -> If it comes often, see whether
        #: workers serve the queue of the first in line.
        reason = f"the line for lock {conflict.key!r} is full: {answer.waiting} tasks wait in it"
        if delivery.notes.parked is not None:  # its record was lost, or is on its way there
            put_off(delivery, reason, error=conflict.error())
        skip(delivery, reason)
    if isinstance(answer, Conflict):
        _count(delivery, conflict, "copy")
        put_off_copy(delivery, answer)
    return answer


def reject(asking: Acquisition, conflict: Conflict) -> NoReturn:
    """Reject the message without requeueing, so that its queue may dead-letter it."""
    delivery = asking.delivery
    _leave_end(delivery)
    error = _error(delivery, conflict)
    rejection = Reject(str(error), requeue=False)
    if not delivery.is_eager and not CELERY_FAILS_REJECTED:
        task, request = delivery.task, delivery.request
        store_end(task, request, rejection, states.FAILURE, call_errbacks=True)
    #: INFO `Task … rejected: lock … is held by … Its message goes to the dead-letter exchange, if
    #: any.`: A conflict, with "reject".
    what = f"rejected: {error}. Its message goes to the dead-letter exchange, if any."
    raise delivery.logged(rejection, what)


STRATEGIES: dict[str, Callable[[Acquisition, Conflict], Lease | None]] = {
    "skip": _skip,
    "raise": fail,
    "retry": retry,
    "wait": wait,
    "queue": queue,
    "cancel": queue,
    "reject": reject,
}


def _ask(decide: Callable[[Task, Conflict], str | None], task: Task, conflict: Conflict) -> str:
    """Let a callable choose; an Ignore, Reject or Retry that it raises stands for a strategy."""
    try:
        chosen = decide(task, conflict)
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
    # With "cancel", a message has to say when it was sent, which only the option sees to.
    names = [name for name in STRATEGIES if name != "cancel"]
    if chosen not in names:
        allowed = ", ".join(map(repr, names))
        raise SettingsError(
            task.name, "lock_on_conflict", chosen, f"return None or one of {allowed}"
        )
    return chosen


def put_off_copy(delivery: Delivery, conflict: Conflict) -> NoReturn:
    """
    Put off a copy of a task that runs, or a turn that comes before its task may start.

    Raises Ignore, which leaves the result untouched.
    """
    if conflict.early:
        put_off(delivery, str(conflict.error()), at=conflict.remaining)
    #: WARNING `Task … put off for … s: another delivery of this task holds lock …`: The broker
    #: has delivered a task twice, and the first delivery runs. -> If it comes often, the
    #: `visibility_timeout` may be too short.
    reason = (
        f"another delivery of this task holds lock {conflict.key!r}: {in_words(conflict.holder)}"
        f"{so_far(conflict.held_for, conflict.renewed)}"
    )
    # A turn that is claimed late may be given twice, which needs no warning.
    level = logging.WARNING if delivery.notes.parked is None else logging.INFO
    put_off(delivery, reason, at_most=conflict.remaining, level=level)
