"""What one process knows of an app's locks, in a form that can be compared over processes."""

from __future__ import annotations

from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from celery_dislock.config.options import TaskOptions
from celery_dislock.exceptions import DislockError
from celery_dislock.redaction import reason_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from celery_dislock.locks.runtime import Runtime


def about(runtime: Runtime[Any], tasks: Mapping[str, TaskOptions]) -> dict[str, Any]:
    """
    Describe an app's locks.  No round trip.

    Args:
        runtime: The locks of the app.
        tasks: The options of each guarded task, by the task's name.

    Returns:
        A JSON object: version, whether tasks lock, lock server without its password, prefix, and
        of each task the options that differ from the defaults.  It has no "error": Celery's
        command line takes an answer with one for the refusal of the command.
    """
    description: dict[str, Any] = {
        "version": _version(),
        "enabled": runtime.enabled,
        "locks": not runtime.off,
        "server": None,
        "prefix": None,
        "no_server": None,
        "tasks": {name: differing(options) for name, options in sorted(tasks.items())},
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
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if callable(value):  # each process has another repr of it
        return f"{getattr(value, '__module__', '?')}.{getattr(value, '__qualname__', '?')}"
    return value


def _version() -> str:
    try:
        return version("celery-dislock")
    except PackageNotFoundError:
        return "?"
