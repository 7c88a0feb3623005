"""What the commands share: the app's locks, the choice of one, output, and how errors end them."""

from __future__ import annotations

import functools
import getpass
import json
import logging
import re
from contextlib import contextmanager
from functools import partial
from socket import gethostname
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from celery_dislock.config.urls import MEMORY
from celery_dislock.config.values import LONGEST, did_you_mean
from celery_dislock.exceptions import DamagedLockError, DislockError, SettingsError, StoreError
from celery_dislock.keys.templates import check_written
from celery_dislock.operating.cli.table import columns, table
from celery_dislock.operating.locks import AppLocks
from celery_dislock.operating.site import WORKERS_WITHIN
from celery_dislock.tasks.actions import BrokerError
from celery_dislock.tasks.task import guard_of, lock_for
from celery_dislock.words import plain, to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from celery import Celery

    from celery_dislock.config.options import TaskOptions

FOUND = 1  # exit code: a finding, or nothing to do it to
AWAY = 3  # exit code: the lock server, or the broker that was needed, did not answer

NO_SERVER = (
    "Name the app, as in `celery -A proj dislock ls`, or the lock server, as in "
    "`celery dislock --dislock-url redis://localhost ls`"
)
ELSEWHERE = "its locks are inside the process that uses them, and no command can see them"

as_json = click.option("--json", "json_", is_flag=True, help="Write JSON, for programs.")
within = partial(  # the option of commands that ask the workers
    click.option,
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=WORKERS_WITHIN,
    show_default=True,
    metavar="SECONDS",
)

logger = logging.getLogger("celery_dislock")

_UNITS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_TIME = re.compile(r"(\d+(?:\.\d+)?) ?([a-z]*)")


def duration(text: str) -> float:
    """Read a time above 0 from the command line: ``90``, ``10m``, ``2h``, ``1.5d``; in seconds."""
    found = _TIME.fullmatch(text.strip().lower())
    if not found or found[2] not in _UNITS or not float(found[1]):
        raise click.BadParameter(f"{text!r} is no time above 0; give 90 (seconds), 10m, 2h or 1d")
    seconds = float(found[1]) * _UNITS[found[2]]
    if seconds > LONGEST:
        raise click.BadParameter(f"{plain(text)} is too long: give {LONGEST:.0f} seconds at most")
    return seconds


class _Away(click.ClickException):
    exit_code = AWAY


@contextmanager
def session(context: click.Context) -> Iterator[AppLocks]:
    """Open the app's lock server for a command; an error ends the command with its exit code."""
    opened = AppLocks(context.obj.app)
    try:
        if opened.runtime.conf.get("dislock_url") == MEMORY:
            raise SettingsError("app.conf", "dislock_url", MEMORY, ELSEWHERE)
        yield opened
    except (StoreError, BrokerError) as exc:
        failed = click.ClickException if isinstance(exc, DamagedLockError) else _Away
        raise failed(plain(exc)) from exc
    except DislockError as exc:
        is_missing = isinstance(exc, SettingsError) and exc.value is None
        remedy = f". {NO_SERVER}" if is_missing else ""
        raise click.UsageError(f"{plain(exc)}{remedy}", context) from exc
    except UnicodeEncodeError as exc:  # an argument, of which Python keeps bytes as surrogates
        raise click.UsageError(f"{exc.object!a} is no UTF-8.", context) from exc
    finally:
        opened.runtime.close()


class WhichLock(NamedTuple):
    """
    Which lock a command is about.

    Attributes:
        key: The key; None: the task says it.
        task: Name of a task; None: the key was given.
        args, kwargs: The task's arguments.
    """

    key: str | None
    task: str | None = None
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}

    def keys(self, opened: AppLocks) -> Sequence[str]:
        """
        Return the keys, in the order in which they are taken.

        Raises:
            LockKeyError: The key cannot be used, or none can be built from the arguments.
            SettingsError: The task takes no lock.
        """
        if self.task is None:
            return [check_written(self.key or "")]
        task = _task(opened.app, self.task)
        try:
            return lock_for(task, *self.args, **self.kwargs).keys
        except DislockError:
            raise
        except Exception as exc:  # the arguments are not the task's, or its callable refuses them
            raise click.UsageError(f"task {self.task}: {plain(exc)}") from exc

    def options(self, opened: AppLocks) -> TaskOptions | None:
        """Return the options of the task; None: the key was given."""
        return None if self.task is None else guard_of(_task(opened.app, self.task)).options

    def names(self, opened: AppLocks) -> Sequence[str]:
        """Return the names in Redis; see :meth:`keys`."""
        return opened.runtime.lock_names(self.keys(opened))


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
        hint = did_you_mean(name, tuple(app.tasks)) or ". Does -A name the right app?"
        raise click.UsageError(f"This app has no task {name!r}{hint}") from None


def user() -> str:
    """Return the name of who runs the command."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        return "an operator"


def record(done: str) -> None:
    """Log what a command has changed, and who did it: a record, as the page writes them."""
    logger.warning("Command: %r on %s %s.", user(), gethostname(), done)


def write_remark(text: str) -> None:
    """Write a line for people, beside the output."""
    click.echo(plain(text), err=True)


def write_json(found: Any) -> None:
    """Write JSON, which a terminal can show, too."""
    click.echo(to_json(found, indent=2, default=str))


def write_table(cells_of: Mapping[str, Callable[..., object]], rows: Iterable[Any]) -> None:
    """Write rows under headings, as wide as the terminal; see :mod:`.table`."""
    click.echo("\n".join(table(cells_of, rows, columns())))
