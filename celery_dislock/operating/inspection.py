"""Answer ``celery inspect dislock``: how a worker locks, and what its running tasks hold.

``celery inspect dislock_task ID`` tells what a worker knows of one task.

The worker's main process answers.  It knows its settings, and the tasks that run in its pool.
Whether these hold their locks, it asks the lock server: under prefork the leases are in the pool
processes, which cannot be asked.
"""

from __future__ import annotations

import time
from contextlib import closing, suppress
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from celery.app.task import Context
from celery.worker import state as worker_state

from celery_dislock.config.options import Key, TaskOptions
from celery_dislock.config.terms import Rate
from celery_dislock.exceptions import DislockError, StoreError
from celery_dislock.keys.names import shown_id
from celery_dislock.keys.templates import key_of
from celery_dislock.messages.headers import PUT_OFF, notes_in
from celery_dislock.parking.process import runtime_of
from celery_dislock.redaction import reason_of
from celery_dislock.servers.overview import PLACES_SHOWN, Overview
from celery_dislock.tasks.request import is_child, scheduled
from celery_dislock.tasks.task import guards_of
from celery_dislock.words import for_people

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from celery import Celery
    from celery.worker import WorkController
    from celery.worker.request import Request

    from celery_dislock.servers.view import LockState

FULL = "full"  # the argument of `celery inspect dislock` that asks for everything
SHORT = 20  # leases that are listed without it
INSPECT_TASK = "dislock_task"  # the command that asks for one task
ACTIVE, RESERVED, SCHEDULED = "active", "reserved", "scheduled"  # what a task is in a worker
BEGINS_WITHIN = 5.0  # seconds in which a task that has a slot takes its lock, or waits for it
WITHIN = 0.5  # seconds to wait for a reply of the lock server; the worker's event loop waits, too


def inspect_locks(state: Any, shown: Sequence[str] | None = None, **_kwargs: Any) -> dict[str, Any]:
    """How this worker locks, and the leases of the tasks that it runs; "full": with all details."""
    answer = inspection(state.app, state.consumer.controller)
    # Celery's command line always gives a list; programs that ask leave it out, and get everything.
    return answer if shown is None or FULL in shown else _in_short(answer)


def inspect_task(state: Any, task_id: str, **_kwargs: Any) -> dict[str, Any]:
    """What this worker knows of one task: whether it runs or waits here; its queues, too."""
    consumer = state.consumer
    queues = consumer.task_consumer.queues if consumer.task_consumer else ()
    told = {
        "locks": not runtime_of(state.app).off,
        "queues": sorted(queue.name for queue in queues),
        "revoked": task_id in worker_state.revoked,
    }
    for name, requests in (
        (ACTIVE, worker_state.active_requests),
        (RESERVED, worker_state.reserved_requests),
        (SCHEDULED, scheduled(consumer)),
    ):
        found = next((request for request in list(requests) if request.id == task_id), None)
        if found is not None:
            return {**told, "is": name, **_of_request(found)}
    return {**told, "is": None}


def _of_request(request: Request) -> dict[str, Any]:
    guard, keys = getattr(request.task, "dislock_guard", None), []
    if guard is not None and guard.has_lock:
        with suppress(Exception):  # of a user's callable, for a key
            keys = list(guard.keys_of(request))
    return {
        "task": request.task.name,
        "keys": keys,
        "pid": request.worker_pid,
        "since": request.time_start,
        "eta": request.eta.timestamp() if request.eta else None,
        "put_off": notes_in(request.message.headers).get(PUT_OFF, 0),
    }


def inspection(app: Celery, worker: WorkController) -> dict[str, Any]:
    """
    Describe a worker's locks; blocks for a round trip.

    Args:
        app: The worker's app.
        worker: The worker.

    Returns:
        A JSON object: what :func:`about` returns, and "warnings" of
        the worker's start, "errors" that the main process's watchdog has survived, "unavailable":
        why the lock server did not answer, or None, and "leases".
    """
    answer = about(app)
    answer["warnings"] = [
        warning for step in worker.steps for warning in getattr(step, "warnings", ())
    ]
    answer |= {"errors": 0, "unavailable": None, "leases": []}
    if answer["no_server"] is None and answer["locks"]:
        answer["errors"] = runtime_of(app).process.watchdog.errors
        try:
            answer["leases"] = _leases(app)
        except StoreError as exc:
            answer["unavailable"] = str(exc)
    return answer


def about(app: Celery) -> dict[str, Any]:
    """
    Describe an app's locks.  No round trip.

    Returns:
        A JSON object: version, whether tasks lock, lock server without its password, prefix, and
        of each task the options that differ from the defaults.  It has no "error": Celery's
        command line takes an answer with one for the refusal of the command.
    """
    runtime, guards = runtime_of(app), guards_of(app)
    description: dict[str, Any] = {
        "version": _version(),
        "enabled": runtime.enabled,
        "locks": not runtime.off,
        "server": None,
        "prefix": None,
        "no_server": None,
        "tasks": {name: differing(guard.options) for name, guard in sorted(guards.items())},
    }
    try:
        description["server"] = runtime.process.store.server
        description["prefix"] = runtime.settings.dislock_prefix
    except DislockError as exc:
        description["no_server"] = reason_of(exc)
    return description


def differing(options: TaskOptions) -> dict[str, Any]:
    """Return the options that are not the defaults, as JSON can have them."""
    values = ((option.name, getattr(options, option.name)) for option in fields(TaskOptions))
    return {name: _plain(value) for name, value in values if value != getattr(TaskOptions, name)}


def _plain(value: Any) -> Any:
    if isinstance(value, Rate):
        return str(value)
    if isinstance(value, Key):
        rate = value.rate if value.rate is None or callable(value.rate) else Rate.of(value.rate)
        known = {"key": value.key, "limit": value.limit, "rate": rate, "cost": value.cost}
        return {name: _plain(given) for name, given in known.items() if given is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if callable(value):  # each process has another repr of it
        return f"{getattr(value, '__module__', '?')}.{getattr(value, '__qualname__', '?')}"
    return value


def _version() -> str:
    try:
        return version("celery-dislock")
    except PackageNotFoundError:
        return "?"


def _leases(app: Celery) -> list[dict[str, Any]]:
    """Return a lease, or that there is none, for each lock of each running task."""
    runtime = runtime_of(app)
    wanted = list(_locks_of_running_tasks())
    if not wanted:
        return []
    with closing(runtime.process.new_store(WITHIN)) as store:
        overview = Overview(store.lock_server, runtime.settings.dislock_prefix)
        locks = overview.look([name for _, name in wanted], most=PLACES_SHOWN)
    leases = (
        (request, _lease(request, name, None if isinstance(lock, StoreError) else lock))
        for (request, name), lock in zip(wanted, locks, strict=True)
    )
    return [lease for request, lease in leases if lease["held"] or not _is_forgotten(request)]


def _locks_of_running_tasks() -> Iterator[tuple[Request, str]]:
    for request in list(worker_state.active_requests):
        guard = getattr(request.task, "dislock_guard", None)
        if guard is not None and guard.options.lock_limit is not None:
            with suppress(Exception):  # of a user's callable, for a key; then the body does not run
                turn = guard.turn_of(Context(request.request_dict))
                names = guard.runtime.lock_names(guard.keys(request.args, request.kwargs))
                if turn and turn[0] not in names:  # its code names other keys by now
                    names = (turn[0],)
                yield from ((request, name) for name in names)


def _is_forgotten(request: Request) -> bool:
    """
    Tell whether the pool knows nothing of a task that Celery takes for running; it may have ended.

    Before 5.6.3, Celery's pool forgets what it runs when the broker is lost.
    """
    known = getattr(request, "_apply_result", None)
    return known is not None and known() is None and is_child(request.worker_pid)


def _lease(request: Request, name: str, lock: LockState | None) -> dict[str, Any]:
    about_task = {
        "key": key_of(name),
        "task": request.task.name,
        "id": request.id,
        "pid": request.worker_pid,
    }
    for held in lock.holders if lock else ():
        if held.id == shown_id(request.id) and held.worker == request.hostname and not held.turn:
            return {
                **about_task,
                "pid": held.pid,  # greenlets and threads have numbers of their own in a request
                "held": True,
                "token": held.token,
                "cost": held.cost,
                "held_for": held.held,
                "remaining": held.remaining,
                "renewed": held.renewed,
                "overdue": held.is_overdue,
            }
    return {**about_task, "held": False, "missed": _misses(request, lock)}


def _misses(request: Request, lock: LockState | None) -> bool:
    """Tell whether a task runs without its lock for certain: it neither begins nor waits for it."""
    if lock is None or lock.waiting > len(lock.line):  # it may wait behind those
        return False
    is_young = time.time() - (request.time_start or time.time()) < BEGINS_WITHIN
    return not (is_young or any(waiter.id == shown_id(request.id) for waiter in lock.line))


def _in_short(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer with a line for each lease."""
    lines = [_line(lease) for lease in answer["leases"][:SHORT]]
    left = len(answer["leases"]) - SHORT
    if left > 0:
        lines.append(f"and {left} more")
    return {**answer, "tasks": len(answer["tasks"]), "leases": lines}


def _line(lease: Mapping[str, Any]) -> str:
    what = f"does not hold {lease['key']}"
    if lease["held"]:
        what = f"has held {lease['key']} for {for_people(lease['held_for'])}"
        if lease["overdue"]:
            what += f", last renewed {for_people(lease['renewed'])} ago"
    return f"{lease['task']}[{lease['id']}] in process {lease['pid']} {what}"
