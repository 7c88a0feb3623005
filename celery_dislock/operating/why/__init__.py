"""Why does a task not run?  One answer in one sentence, from the task's id alone.

The result backend is asked, the lock server, and the workers; who answers for certain ends the
search, and the workers are asked last, as they take a second.  Nothing is changed, and nothing is
guessed: what could not be asked is told with the answer.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from celery import states

from celery_dislock.operating.why.case import Case
from celery_dislock.operating.why.sentences import of_record
from celery_dislock.operating.why.traces import TRACES, ended, unknown
from celery_dislock.parking.process import runtime_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from celery import Celery

    from celery_dislock.locks.runtime import Runtime
    from celery_dislock.parking.process import ParkingProcess
    from celery_dislock.tasks.answer import Answer

WORKERS_WITHIN = 1.0  # seconds for the workers' answers
LOOKS = 3  # at a task that moves on while it is looked at


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
    Tell why a task does not run, or that it does.  Blocks; see :class:`Answer`.

    Args:
        app: The task's app; None: there is none.
        task_id: The task's id.
        keys: Keys of locks: only these are looked at.
        timeout: Seconds to wait for the workers, if they are asked.
        errors: Whether errors of bodies are told, whose texts may have arguments.
        runtime: What the app's locks share; None: that of the app.

    Raises:
        SettingsError: There is no lock server.
        LockKeyError: A key cannot be used.
    """
    its = runtime_of(app) if runtime is None else runtime
    for look in range(1, LOOKS + 1):
        case = Case(task_id, app, its, keys, timeout, errors)
        answer = next(_answers(case, is_last=look == LOOKS), None)
        if answer is not None:
            return answer
    return unknown(case)


def _answers(case: Case, *, is_last: bool) -> Iterator[Answer]:
    """Yield an answer; nothing if what was found is over by now, and another look may tell more."""
    if case.stored.state not in {states.SUCCESS, states.REVOKED}:
        case.look()
    moved_on = False
    for found in case.found:
        answer = case.guarded(partial(of_record, case, found))
        if answer is not None:
            yield answer
        moved_on = moved_on or found.is_certain
    if (over := ended(case)) is not None:
        yield over
    if moved_on and not is_last and not case.away:
        return
    for trace in TRACES:
        answer = case.guarded(partial(trace, case))
        if answer is not None:
            yield answer
    yield unknown(case)
