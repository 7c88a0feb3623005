"""What this package relies on of Celery, kombu and redis-py, beyond what these document.

:mod:`celery_dislock.hooks` says what is wrapped or replaced, and why.  Here stands what must be so
for that to work.  Tests run all of it with the oldest and the newest versions, and with those to
come.  A worker runs it if one of the packages is newer than those that were tried.  If a fact does
not hold, the worker does not start: tasks could run without their locks.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any, TypeAlias

from celery import Celery, Task, signals
from celery.app import trace

from celery_dislock.exceptions import DislockError

Fact: TypeAlias = Callable[[], object]  # whether it is so; an exception: it is not

# The newest minor version of each package with which all tests have run.
TRIED = {"celery": (5, 7), "kombu": (5, 7), "redis": (8, 1)}


def takes(place: str, *names: str, keywords: Sequence[str] = ()) -> Fact:
    """
    Make the fact that a function takes arguments of these names first, in this order.

    Args:
        place: Where the function is: ``"module:Class.function"``.
        names: The arguments; without ``self``, if it is a method.
        keywords: More arguments, which may stand anywhere.
    """

    def holds() -> bool:
        parameters = inspect.signature(_imported(place)).parameters
        found = [parameter for parameter in parameters if parameter != "self"]
        return found[: len(names)] == [*names] and {*keywords} <= {*found}

    return holds


def _imported(place: str) -> Any:
    module, _, path = place.partition(":")
    found = import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


def _sends_itself() -> bool:
    """``Task.apply_async`` sends by ``Celery.send_task``, and says which task it is."""
    sent = []

    class Probe(Celery):  # type: ignore[misc]
        def send_task(self, name: str, *args: Any, task_type: Any = None, **_options: Any) -> None:
            sent.append((name, *args, task_type))

    called: Any = type("Called", (_Called,), {})
    called.bind(Probe(set_as_current=False))  # not registered: the app would be made final
    task = called()
    task.apply_async((1,), {})
    return sent == [(task.name, (1,), {}, task)]


class _Called(Task):  # type: ignore[misc]
    name, typing = "dislock.called", False

    def __call__(self) -> None:
        """Stand for the guard's."""


def _gives(signal: Any, *names: str) -> Fact:
    return lambda: {*names} <= signal.providing_args


BACKEND = "celery.backends.base:Backend"
CONSUMER = "celery.worker.consumer.consumer:Consumer"
REQUEST = "celery.worker.request:Request"

# By what is wrapped or replaced, as the table of hooks.py calls it.
FACTS: dict[str, tuple[Fact, ...]] = {
    "Celery.send_task": (
        takes(
            "celery:Celery.send_task",
            *("name", "args", "kwargs", "countdown", "eta", "task_id"),
            keywords=("task_type", "expires", "options"),
        ),
        _sends_itself,
    ),
    "Signature.set, Task.retry": (
        takes("celery.canvas:Signature.set", "immutable", keywords=("options",)),
        takes("celery:Task.retry", keywords=("options",)),
    ),
    "Control.revoke, a worker's revoke": (
        takes("celery.app.control:Control.revoke", "task_id"),
        takes("celery.worker.control:revoke", "state", "task_id"),
    ),
    "filter_hidden_settings": (takes("celery.app.utils:filter_hidden_settings", "conf"),),
    "AsyncResult.duplicate": (
        lambda: not hasattr(_imported("celery.result:ResultBase"), "duplicate"),
    ),
    "Backend.mark_as_done and the like": (
        takes(f"{BACKEND}.mark_as_done", "task_id", "result", keywords=("request", "store_result")),
        takes(f"{BACKEND}.mark_as_failure", "task_id", "exc", keywords=("request", "store_result")),
        takes(
            f"{BACKEND}.mark_as_revoked", "task_id", "reason", keywords=("request", "store_result")
        ),
    ),
    "Task.bind": (takes("celery:Task.bind", "app"),),
    "pydantic_wrapper": (
        takes("celery.app.base:pydantic_wrapper", "app", "task_fun", "task_name"),
    ),
    "a task class's __call__": (
        lambda: trace.task_has_custom(_Called(), "__call__"),
        lambda: not trace.task_has_custom(Task(), "__call__"),
        _gives(signals.task_prerun, "task"),
        _gives(signals.task_postrun, "task", "retval"),
    ),
    "its apply, on_replace": (
        takes("celery:Task.apply", "args", "kwargs"),
        takes("celery:Task.on_replace", "sig"),
    ),
    "its Request": (
        lambda: issubclass(_imported(REQUEST), object) and isinstance(Task.Request, str),
        takes(f"{REQUEST}.on_failure", "exc_info"),
        takes(f"{REQUEST}.on_timeout", "soft", "timeout"),
        takes(f"{REQUEST}.reject", "requeue"),
        takes(f"{REQUEST}.terminate", "pool", "signal"),
        takes(f"{REQUEST}.cancel", "pool", "signal"),
        takes(f"{REQUEST}.send_event", "type"),
        lambda: {"worker_pid", "time_start"} <= {*dir(_imported(REQUEST))},
        lambda: _imported("celery.concurrency.prefork:TaskPool").uses_semaphore,
    ),
    "options of celery worker, beat": (
        lambda: _imported("celery.bin.worker:worker").params is not None,
        lambda: _imported("celery.bin.beat:beat").params is not None,
    ),
    "Service.get_scheduler of beat": (
        takes("celery.beat:Service.__init__", "app", keywords=("scheduler_cls",)),
        takes("celery.beat:Service.get_scheduler"),
    ),
    "a consumer's methods for messages": (
        takes(f"{CONSUMER}.on_decode_error", "message", "exc"),
        takes(f"{CONSUMER}.on_unknown_message", "body", "message"),
        takes(f"{CONSUMER}.on_unknown_task", "body", "message", "exc"),
        takes(f"{CONSUMER}.on_invalid_task", "body", "message", "exc"),
        takes(f"{CONSUMER}.update_strategies"),
        takes("celery.worker.strategy:default", "task", "app", "consumer"),
        _gives(signals.task_revoked, "request"),
    ),
    "a worker's wait_for_soft_shutdown": (
        takes("celery.worker.worker:WorkController.wait_for_soft_shutdown"),
    ),
    "the logger of celery.app.trace": (lambda: trace.logger.name == "celery.app.trace",),
    "redis-py's connections": (
        takes("redis:Connection.send_packed_command", "command", "check_health"),
        lambda: {"_sock", "_parser"} <= {*dir(_imported("redis:Connection")())},
        lambda: {"_reader", "_writer"} <= {*dir(_imported("redis.asyncio:Connection")())},
        lambda: _imported("redis.asyncio:Connection")()._parser.on_disconnect,  # noqa: SLF001
    ),
}


def broken() -> list[str]:
    """Return what of :data:`FACTS` is otherwise in this process."""
    return [name for name, facts in FACTS.items() if not all(map(_holds, facts))]


def _holds(fact: Fact) -> bool:
    try:
        return bool(fact())
    except Exception:  # noqa: BLE001 -- whatever is missing
        return False


def newer() -> list[str]:
    """Return the packages that are newer than those that were tried, with their versions."""
    return [f"{name} {version(name)}" for name, last in TRIED.items() if _minor(name) > last]


def _minor(name: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version(name))[:2]))


def about_versions() -> list[str]:
    """
    Warn of packages that are newer than those that were tried.

    Raises:
        DislockError: Something that locks rely on is otherwise in them.
    """
    untried = " and ".join(newer())
    if not untried:
        return []
    if wrong := broken():
        raise DislockError(
            f"{untried} is newer than this release of celery-dislock knows, and tasks could run "
            f"without their locks, as these have changed: {'; '.join(wrong)}. Install an older "
            "version of it, or a newer celery-dislock"
        )
    #: WARNING: Locks work as they did. -> Update celery-dislock when there is a release for it.
    warning = f"{untried} is newer than this release of celery-dislock was tried with"
    return [f"{warning}; what locks rely on was checked, and is as it was."]
