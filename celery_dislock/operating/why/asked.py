"""What the result backend and the workers tell of one task."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from celery import states
from celery.backends.base import DisabledBackend
from celery.backends.rpc import RPCBackend
from celery.exceptions import NotRegistered, TaskRevokedError

from celery_dislock.exceptions import DislockError
from celery_dislock.messages.broker import answer_within
from celery_dislock.messages.headers import UNTIL_MOST
from celery_dislock.operating.inspection import ACTIVE, INSPECT_TASK, RESERVED, SCHEDULED
from celery_dislock.operating.site import ANSWERS_WITHIN
from celery_dislock.redaction import reason_of
from celery_dislock.servers.records import bounded, bounded_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from celery import Celery

NO_BACKEND = "this app has none"
OF_ITS_SENDER = "it keeps results for the process that has sent the task"


class StoredResult(NamedTuple):
    """
    What the result backend has of a task.

    Attributes:
        state: The task's state; empty: nothing is stored.
        reason: The text of the result, if that is an error.
        at: UNIX time at which the result was stored; None: it is not known.
        key: The key of the lock that was in its way, if the task is parked.
        first: The key of the lock that has its record then: the first of its locks.
        unknown: Why the backend could not be asked; empty: it was.
    """

    state: str = ""
    reason: str = ""
    at: float | None = None
    key: str | None = None
    first: str | None = None
    unknown: str = ""


def ask_backend(app: Celery | None, task_id: str, *, errors: bool) -> StoredResult:
    """
    Ask for a task's result; blocks for some seconds at most, and raises nothing.

    Args:
        app: The app; None: there is none.
        task_id: The task's id.
        errors: Whether to return the texts of bodies' errors, which may contain arguments.
    """
    if app is None:
        return StoredResult(unknown=NO_BACKEND)
    try:
        backend = app.backend
        if isinstance(backend, DisabledBackend):
            return StoredResult(unknown=NO_BACKEND)
        if isinstance(backend, RPCBackend):
            return StoredResult(unknown=OF_ITS_SENDER)
        meta = answer_within(ANSWERS_WITHIN, partial(backend.get_task_meta, task_id))
        return _stored(meta, errors=errors)
    except Exception as exc:  # noqa: BLE001 -- of any backend
        return StoredResult(unknown=reason_of(exc))


def _stored(meta: Mapping[str, Any], *, errors: bool) -> StoredResult:
    state, result = str(meta.get("status")), meta.get("result")
    if state == states.PENDING:
        return StoredResult()
    reason = ""
    if isinstance(result, BaseException):
        is_told = errors or isinstance(result, (DislockError, NotRegistered, TaskRevokedError))
        reason = bounded(_text_of(result)) if is_told else type(result).__name__
    parked = result if isinstance(result, dict) else {}
    key, first = (bounded_text(parked.get(name)) for name in ("key", "first"))
    return StoredResult(state, reason, _unix(meta.get("date_done")), key, first or key)


def _text_of(error: BaseException) -> str:
    """Return an error's text, with its kind where the text alone says nothing."""
    if isinstance(error, NotRegistered):
        return f"task {error} is not registered in the worker that had its message"
    text = str(error)
    return f"{type(error).__name__}: {text}" if isinstance(error, KeyError) or not text else text


def _unix(given: Any) -> float | None:
    """Return a time as backends have it, in UTC if they do not say; None: it cannot be read."""
    try:
        when = given if isinstance(given, datetime) else datetime.fromisoformat(given)
        return (when if when.tzinfo else when.replace(tzinfo=timezone.utc)).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


class Worker(NamedTuple):
    """
    What a worker has told of a task; see :func:`celery_dislock.operating.inspection.inspect_task`.

    Attributes:
        name: The worker's name.
        has: State of the task in this worker: ACTIVE, RESERVED or SCHEDULED; empty: it is not
            there.
        task: The task's name.
        keys: Keys that the task needs.
        pid: The process that runs it.
        since, eta: UNIX times since which the task runs, and at which it is due; None: not known.
        put_off: How often the task was put off.
        revoked: Whether the task is revoked.
        locks: Whether the worker's tasks lock.
        queues: The queues that the worker consumes.
    """

    name: str
    has: str = ""
    task: str | None = None
    keys: Sequence[str] = ()
    pid: int | None = None
    since: float | None = None
    eta: float | None = None
    put_off: int = 0
    revoked: bool = False
    locks: bool = True
    queues: Sequence[str] = ()

    @classmethod
    def of(cls, name: str, told: Mapping[str, Any]) -> Worker:
        """Read an answer; anybody who can send messages may have forged it."""
        has, pid, times = told.get("is"), told.get("pid"), told.get("put_off")
        return cls(
            name,
            has if has in {ACTIVE, RESERVED, SCHEDULED} else "",
            bounded_text(told.get("task")),
            _texts(told.get("keys")),
            pid if type(pid) is int else None,
            _time(told.get("since")),
            _time(told.get("eta")),
            times if type(times) is int else 0,
            told.get("revoked") is True,
            told.get("locks") is not False,
            _texts(told.get("queues")),
        )


def _texts(given: object) -> list[str]:
    return [text for text in given if isinstance(text, str)] if isinstance(given, list) else []


def _time(given: object) -> float | None:
    if isinstance(given, (int, float)) and 0 < given < UNTIL_MOST:
        return float(given)
    return None


class WorkersWord(NamedTuple):
    """
    What the workers have told of a task.

    Attributes:
        workers: The workers that know the command, by name.
        strangers: The workers that answered, but do not know the command.
        unknown: Why the workers could not be asked; empty: they were.
    """

    workers: Mapping[str, Worker] = {}
    strangers: Sequence[str] = ()
    unknown: str = ""

    @property
    def having(self) -> Worker | None:
        """The worker that has the task; None: none of them has it."""
        return next((worker for worker in self.workers.values() if worker.has), None)

    def serving(self, queue: str) -> list[str]:
        """Return the workers that consume a queue."""
        return [name for name, worker in self.workers.items() if queue in worker.queues]

    @property
    def nobody(self) -> bool:
        """Whether no worker has answered, though they could be asked."""
        return not (self.workers or self.strangers or self.unknown)


def ask_workers(app: Celery | None, task_id: str, timeout: float) -> WorkersWord:
    """
    Ask all workers for a task; blocks for *timeout* seconds, and raises nothing.

    Args:
        app: The app; None: there are no workers.
        task_id: The task's id.
        timeout: Seconds to wait for the workers' answers, after the broker has connected.
    """
    if app is None:
        return WorkersWord(unknown="these locks have no app")
    answers: dict[str, Any] = {}

    def take(reply: Mapping[str, Any]) -> None:
        answers.update(reply)
        if any(isinstance(answer, dict) and answer.get("is") for answer in reply.values()):
            raise _HasIt

    ask = partial(app.control.broadcast, INSPECT_TASK, callback=take, reply=True, timeout=timeout)
    try:
        with suppress(_HasIt):  # the others need not be waited for
            within = timeout + ANSWERS_WITHIN
            answer_within(within, partial(ask, arguments={"task_id": task_id}))
    except Exception as exc:  # noqa: BLE001 -- of any broker
        return WorkersWord(unknown=f"the broker: {reason_of(exc)}")
    known = {
        n: answer
        for n, answer in answers.items()
        if isinstance(answer, dict) and "queues" in answer
    }
    workers = {name: Worker.of(name, answer) for name, answer in sorted(known.items())}
    return WorkersWord(workers, sorted(answers.keys() - known.keys()))


def lacking(app: Celery, task: str, workers: Sequence[str], timeout: float) -> list[str]:
    """
    Return which of these workers have no task of this name; blocks for *timeout* seconds.

    Raises nothing.  A worker that does not answer is not named.
    """
    try:
        ask = app.control.inspect(workers, timeout=timeout).registered
        told = answer_within(timeout + ANSWERS_WITHIN, ask) or {}
    except Exception:  # noqa: BLE001 -- of any broker
        return []
    # A worker may tell of a task's attributes, too, after its name.
    have = {name: {str(line).split(" ", 1)[0] for line in told[name] or ()} for name in told}
    return sorted(name for name in workers if name in have and task not in have[name])


class _HasIt(Exception):  # noqa: N818 -- no error
    """A worker has the task."""
