"""What the commands share: the app's locks, their output, and how errors end a command."""

from __future__ import annotations

import getpass
import logging
import re
from contextlib import contextmanager
from socket import gethostname
from typing import TYPE_CHECKING, Any

import click

from celery_dislock.exceptions import DamagedLockError, DislockError, SettingsError, StoreError
from celery_dislock.operating.locks import AppLocks
from celery_dislock.tasks.actions import BrokerError
from celery_dislock.words import plain, to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

FOUND = 1  # exit code: a finding, or nothing to do it to
AWAY = 3  # exit code: the lock server, or the broker that was needed, did not answer

NOTHING = "-"  # an empty cell
NO_SERVER = (
    "Name the app, as in `celery -A proj dislock ls`, or the lock server, as in "
    "`celery dislock --dislock-url redis://localhost ls`"
)

as_json = click.option("--json", "json_", is_flag=True, help="Write JSON, for programs.")

logger = logging.getLogger("celery_dislock")

_UNITS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_TIME = re.compile(r"(\d+(?:\.\d+)?) ?([a-z]*)")


def duration(text: str) -> float:
    """Read a time above 0 from the command line: ``90``, ``10m``, ``2h``, ``1.5d``; in seconds."""
    found = _TIME.fullmatch(text.strip().lower())
    if not found or found[2] not in _UNITS or not float(found[1]):
        raise click.BadParameter(f"{text!r} is no time above 0; give 90 (seconds), 10m, 2h or 1d")
    return float(found[1]) * _UNITS[found[2]]


class _Away(click.ClickException):
    exit_code = AWAY


@contextmanager
def session(context: click.Context) -> Iterator[AppLocks]:
    """Open the app's lock server for a command; an error ends the command with its exit code."""
    opened = AppLocks(context.obj.app)
    try:
        yield opened
    except (StoreError, BrokerError) as exc:
        failed = click.ClickException if isinstance(exc, DamagedLockError) else _Away
        raise failed(plain(exc)) from exc
    except DislockError as exc:
        is_missing = isinstance(exc, SettingsError) and exc.value is None
        remedy = f". {NO_SERVER}" if is_missing else ""
        raise click.UsageError(f"{plain(exc)}{remedy}", context) from exc
    finally:
        opened.runtime.close()


def user() -> str:
    """Return the name of who runs the command."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        return "an operator"


def audit(done: str) -> None:
    """Log what a command has changed, and who did it: a record, as the page writes them."""
    logger.warning("Command: %r on %s %s.", user(), gethostname(), done)


def tell(text: str) -> None:
    """Write a line for people, beside the output."""
    click.echo(plain(text), err=True)


def write_json(found: Any) -> None:
    """Write JSON, which a terminal can show, too."""
    click.echo(to_json(found, indent=2, default=str))


def write_table(
    columns: Mapping[str, Callable[..., object]], rows: Iterable[tuple[Any, ...]]
) -> None:
    """Write rows under headings; each cell is what its column makes of a row, made plain."""
    cells = [list(columns), *cells_of(columns, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    form = "  ".join(f"{{:<{width}}}" for width in widths)
    click.echo("\n".join(form.format(*row).rstrip() for row in cells))


def cells_of(
    columns: Mapping[str, Callable[..., object]], rows: Iterable[tuple[Any, ...]]
) -> list[list[str]]:
    """Return the cells of a table."""
    return [[plain(cell(*row) or NOTHING) for cell in columns.values()] for row in rows]
