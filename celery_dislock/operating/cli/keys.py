"""Which lock a command is about: the one of a key, or of a task and its arguments."""

from __future__ import annotations

import difflib
import functools
import json
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from celery_dislock.keys.templates import check_key
from celery_dislock.tasks.task import guard_of
from celery_dislock.words import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from celery import Celery

    from celery_dislock.operating.locks import AppLocks
    from celery_dislock.tasks.guard import Guard


class WhichLock(NamedTuple):
    """
    Which lock a command is about.

    Attributes:
        key: The key; None: the task says it.
        task: Name of a task; None: the key was given.
        args, kwargs: The task's arguments.
    """

    key: str | None
    task: str | None
    args: Sequence[Any]
    kwargs: dict[str, Any]

    def keys(self, opened: AppLocks) -> Sequence[str]:
        """
        Return the keys, in the order in which they are taken.

        Raises:
            LockKeyError: The key cannot be used, or none can be built from the arguments.
            SettingsError: The task takes no lock.
        """
        if self.task is None:
            return [check_key(self.key or "")]
        guard = self.guard(opened)
        try:
            return guard.keys(self.args, self.kwargs)
        except TypeError as exc:  # the arguments are not the task's
            raise click.UsageError(f"task {self.task}: {plain(exc)}") from exc

    def guard(self, opened: AppLocks) -> Guard:
        """Return the guard of the task that was named."""
        return guard_of(_task(opened.app, str(self.task)))

    def names(self, opened: AppLocks) -> Sequence[str]:
        """Return the names in Redis; see :meth:`keys`."""
        return opened.runtime.lock_names(self.keys(opened))

    def is_known(self, opened: AppLocks) -> bool:
        """Tell whether the lock server knows anything of the lock, or a task names it."""
        if self.key is None:
            return True
        return opened.overview.lock(opened.name_of(self.key), most=0).exists


def by_key(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command KEY, or ``--task`` and its arguments; it gets a :class:`WhichLock`."""

    @click.argument("key", required=False)
    @click.option("--task", metavar="NAME", help="The lock that this task takes, in place of KEY.")
    @click.option("--args", "args_", metavar="JSON", help="With --task: its arguments, as a list.")
    @click.option(
        "--kwargs", "kwargs_", metavar="JSON", help="With --task: keyword arguments, as an object."
    )
    @functools.wraps(command)
    def asked(
        *rest: Any,
        key: str | None,
        task: str | None,
        args_: str | None,
        kwargs_: str | None,
        **options: Any,
    ) -> Any:
        if task is not None and key is not None and "command" in options:  # nothing but COMMAND
            options["command"], key = (key, *options["command"]), None
        if (key is None) == (task is None):
            raise click.UsageError("Give KEY, or --task with the task's arguments.")
        if task is None and (args_ or kwargs_):
            raise click.UsageError("--args and --kwargs are the arguments of --task.")
        args = _parsed("--args", args_, list)
        kwargs = _parsed("--kwargs", kwargs_, dict)
        return command(*rest, which=WhichLock(key, task, args, kwargs), **options)

    return asked


def _parsed(option: str, given: str | None, kind: type) -> Any:
    if given is None:
        return kind()
    try:
        found = json.loads(given)
    except (ValueError, RecursionError) as exc:
        raise click.UsageError(f"{option} is no JSON: {plain(exc)}") from exc
    if not isinstance(found, kind):
        wanted = "a list, such as '[7]'" if kind is list else "an object, such as '{\"a\": 7}'"
        raise click.UsageError(f"{option} must be {wanted}.")
    return found


def _task(app: Celery, name: str) -> Any:
    app.loader.import_default_modules()
    try:
        return app.tasks[name]
    except KeyError:
        near = difflib.get_close_matches(name, app.tasks, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else " Does -A name the right app?"
        raise click.UsageError(f"This app has no task {name!r}.{hint}") from None
