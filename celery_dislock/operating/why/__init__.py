"""Why does a task not run?  One answer in one sentence, from the task's id alone.

The result backend, the lock server and the workers are asked, in this order, until one of them has
a certain answer.  The workers come last, as they take a second.  Nothing is changed, and nothing is
guessed: the answer says which of them could not be asked.

The states, and what the sentence says of each:

``running``
    Where it runs, which lock it has held for how long, and when the lease was renewed.
``running without its lock``
    A worker runs it, and its lock is not its own: the lease was lost, freed or capped.
``locks off``
    A worker with ``--no-dislock`` runs it.
``overdue``
    It holds its lock, and two renewals in a row were missed.
``in line``
    As nth of how many, for which lock, who holds that for how long, and what the task keeps.
``waiting in its slot``
    The same of ``lock_on_conflict="wait"``, or of ``dislock.lock()`` in its body, and where it is.
``paused``
    The same, and why, and for how long so far.
``held back``
    The same, and for how much longer, and why.
``too early``
    The same, and at which rate, and when the next may start.
``has its turn``
    Its message is on its way: since when, for the nth time, in which queue, and who has it.
``put off``
    Until when, and why.
``received``
    A worker has it, and it waits for a free slot there.
``not due``
    A worker or the broker has it until the time that its sender has given.
``being sent``
    Its key is reserved for it, and its sender has not sent it yet.
``sent``
    Its key is reserved for it, and no worker that answers has it; whether its queue is empty.
``duplicate``
    It was never sent: which task's message was there.
``began``
    It has begun and holds no lock: its process has died, perhaps, or its lease was lost.
``replaced``
    It has lost its place in line to a newer task, or was dropped.
``set aside``
    Nobody could read or run it, and why.
``revoked``
    A worker has it, and discards it when its time comes.
``ended``
    How, when, and why.
``not in line``
    Its result says PARKED, and this lock server knows nothing of that.
``not known``
    Nobody knows it, and what that can mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery import states

from celery_dislock.operating.site import WORKERS_WITHIN
from celery_dislock.operating.why.case import Case
from celery_dislock.operating.why.sentences import of_record
from celery_dislock.operating.why.traces import TRACES, unknown
from celery_dislock.parking.process import runtime_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from celery import Celery

    from celery_dislock.locks.runtime import Runtime
    from celery_dislock.parking.process import ParkingProcess
    from celery_dislock.tasks.answer import Answer


def why(
    app: Celery | None,
    task_id: str,
    *,
    keys: Sequence[str] = (),
    timeout: float = WORKERS_WITHIN,
    errors: bool = True,
    runtime: Runtime[ParkingProcess] | None = None,
) -> Answer:
    """
    Tell why a task does not run, or that it does; blocks for a second or two.

    Args:
        app: The task's app; None: there is none.
        task_id: The task's id.
        keys: Keys of locks: only these are looked at.
        timeout: Seconds to wait for the workers, if they are asked.
        errors: Whether the answer may quote errors of bodies, whose texts may contain arguments.
        runtime: What the app's locks share; None: that of *app*.

    Raises:
        SettingsError: There is no lock server.
        LockKeyError: A key cannot be used.
    """
    locks = runtime_of(app) if runtime is None else runtime
    return next(_answers(Case(task_id, app, locks, keys, timeout, errors)))


def _answers(case: Case) -> Iterator[Answer]:
    """Yield answers, the most certain first; the first is the one to give."""
    if case.stored.state not in {states.SUCCESS, states.REVOKED}:
        for found in case.look():
            yield from case.told_by(of_record, found)
            if found.is_certain:  # the record is gone: the task has moved on, mostly in this lock
                for again in case.look(found.lock):
                    yield from case.told_by(of_record, again)
                case.ask_backend_again()
    for trace in TRACES:
        yield from case.told_by(trace)
    yield unknown(case)
