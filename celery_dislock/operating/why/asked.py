"""What the result backend and the workers tell of one task."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from celery import states
from celery.backends.base import DisabledBackend
from celery.backends.rpc import RPCBackend
from celery.exceptions import TaskRevokedError

from celery_dislock.exceptions import DislockError
from celery_dislock.operating.inspection import INSPECT_TASK
from celery_dislock.operating.site import ANSWERS_WITHIN, answer_within
from celery_dislock.redaction import reason_of
from celery_dislock.servers.records import bounded
from celery_dislock.words import plain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from celery import Celery

NO_BACKEND = "this app has none"
OF_ITS_SENDER = "it keeps results for the process that has sent the task"


class Stored(NamedTuple):
    """
    What the result backend has of a task.

    Attributes:
        state: Its state; empty: nothing is stored.
        reason: What its result says, if it is an error.
        at: UNIX time at which that was stored; None: it is not known.
        key: Of a parked task the key of its lock.
        unknown: Why the backend could not be asked; empty: it was.
    """

    state: str = ""
    reason: str = ""
    at: float | None = None
    key: str | None = None
    unknown: str = ""

    @property
    def is_final(self) -> bool:
        """Whether the task has ended."""
        return self.state in states.READY_STATES or self.state in {states.IGNORED, states.REJECTED}


def ask_backend(app: Celery | None, task_id: str, *, errors: bool) -> Stored:
    """
    Ask for a task's result; blocks for some seconds at most, and raises nothing.

    Args:
        app: The app; None: there is none.
        task_id: The task's id.
        errors: Whether errors of bodies are told, which may have arguments in their texts.
    """
    if app is None:
        return Stored(unknown=NO_BACKEND)
    try:
        backend = app.backend
        if isinstance(backend, DisabledBackend):
            return Stored(unknown=NO_BACKEND)
        if isinstance(backend, RPCBackend):
            return Stored(unknown=OF_ITS_SENDER)
        meta = answer_within(ANSWERS_WITHIN, partial(backend.get_task_meta, task_id))
        return _stored(meta, errors=errors)
    except Exception as exc:  # noqa: BLE001 -- of any backend
        return Stored(unknown=plain(reason_of(exc)))


def _stored(meta: Mapping[str, Any], *, errors: bool) -> Stored:
    state, result = str(meta.get("status")), meta.get("result")
    if state == states.PENDING:
        return Stored()
    reason = ""
    if isinstance(result, BaseException):
        is_told = errors or isinstance(result, (DislockError, TaskRevokedError))
        reason = bounded(str(result)) if is_told else type(result).__name__
    key = result.get("key") if isinstance(result, dict) else None
    return Stored(state, reason, _unix(meta.get("date_done")), key if _is_text(key) else None)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _unix(given: Any) -> float | None:
    """Return a time as backends have it, in UTC if they do not say; None: it cannot be read."""
    try:
        when = given if isinstance(given, datetime) else datetime.fromisoformat(given)
        return (when if when.tzinfo else when.replace(tzinfo=timezone.utc)).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


@dataclass(frozen=True)
class Told:
    """
    What the workers have told of a task.

    Attributes:
        workers: The answer of each worker that knows the question.
        strangers: Workers that answered, and do not know it.
        unknown: Why they could not be asked; empty: they were.
    """

    workers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    strangers: tuple[str, ...] = ()
    unknown: str = ""

    @property
    def having(self) -> tuple[str, Mapping[str, Any]] | None:
        """The worker that has the task, and its answer; None: none of them has it."""
        return next(((name, one) for name, one in self.workers.items() if one.get("is")), None)

    def serving(self, queue: str) -> list[str]:
        """Return the workers that consume a queue."""
        return [name for name, one in self.workers.items() if queue in one.get("queues", ())]

    @property
    def nobody(self) -> bool:
        """Whether no worker has answered, though they could be asked."""
        return not (self.workers or self.strangers or self.unknown)


def ask_workers(app: Celery | None, task_id: str, timeout: float) -> Told:
    """
    Ask all workers for a task; blocks for *timeout* seconds, and raises nothing.

    Args:
        app: The app; None: there are no workers.
        task_id: The task's id.
        timeout: Seconds to wait for their answers; those of the broker come on top.
    """
    if app is None:
        return Told(unknown="these locks have no app")
    answers: dict[str, Any] = {}

    def take(reply: Mapping[str, Any]) -> None:
        answers.update(reply)
        if any(isinstance(one, dict) and one.get("is") for one in reply.values()):
            raise _HasIt

    ask = partial(app.control.broadcast, INSPECT_TASK, callback=take, reply=True, timeout=timeout)
    try:
        with suppress(_HasIt):  # the others need not be waited for
            within = timeout + ANSWERS_WITHIN
            answer_within(within, partial(ask, arguments={"task_id": task_id}))
    except Exception as exc:  # noqa: BLE001 -- of any broker
        return Told(unknown=plain(reason_of(exc)))
    known = {n: one for n, one in answers.items() if isinstance(one, dict) and "queues" in one}
    return Told(known, tuple(sorted(answers.keys() - known.keys())))


class _HasIt(Exception):  # noqa: N818 -- no error
    """A worker has the task."""
