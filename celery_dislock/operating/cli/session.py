"""What the commands share: the app's locks, its output, and how errors end a command."""

from __future__ import annotations

import getpass
import logging
import re
import shutil
import sys
from contextlib import contextmanager
from socket import gethostname
from typing import TYPE_CHECKING, Any

import click

from celery_dislock.exceptions import DamagedLockError, DislockError, SettingsError, StoreError
from celery_dislock.keys.values import check_key
from celery_dislock.parking.process import runtime_of
from celery_dislock.servers.overview import Overview
from celery_dislock.tasks.actions import Actions, BrokerError
from celery_dislock.words import plain, to_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from celery import Celery

    from celery_dislock.locks.runtime import Runtime
    from celery_dislock.parking.process import ParkingProcess

FOUND = 1  # exit code: a finding, or nothing to do it to
BETWEEN, LEAST = 2, 6  # columns of a terminal: between two of a table, and of one that is cut
AWAY = 3  # exit code: the lock server, or the broker that was needed, did not answer

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


class Session:
    """
    One command's use of the lock server.

    Args:
        app: The app that ``-A`` names.

    Attributes:
        app: The argument of that name.
        runtime: What the app's locks share.
    """

    def __init__(self, app: Celery) -> None:
        self.app = app
        self.runtime: Runtime[ParkingProcess] = runtime_of(app)

    @property
    def process(self) -> ParkingProcess:
        """The store and the lines of this process."""
        return self.runtime.process

    @property
    def overview(self) -> Overview:
        """What the lock server knows."""
        prefix = self.runtime.settings.dislock_prefix
        return Overview(self.process.store.lock_server, prefix)

    @property
    def actions(self) -> Actions:
        """What a person can do to locks."""
        return Actions(self.app, self.process)

    def name_of(self, key: str) -> str:
        """Return the name in Redis of the lock of a key, as people write it."""
        return self.runtime.lock_names([check_key(key)])[0]


@contextmanager
def session(context: click.Context) -> Iterator[Session]:
    """Open the app's lock server for a command; an error ends the command with its exit code."""
    opened = Session(context.obj.app)
    try:
        yield opened
    except DamagedLockError as exc:
        click.echo(f"Error: {plain(exc)}", err=True)
        sys.exit(FOUND)
    except (StoreError, BrokerError) as exc:
        click.echo(f"Error: {plain(exc)}", err=True)
        sys.exit(AWAY)
    except SettingsError as exc:
        remedy = f". {NO_SERVER}" if exc.value is None else ""
        raise click.UsageError(f"{plain(exc)}{remedy}", context) from exc
    except DislockError as exc:
        raise click.UsageError(plain(exc), context) from exc
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


def as_data(found: Any) -> Any:
    """Return data for JSON, with an object in place of each named tuple."""
    if hasattr(found, "_asdict"):
        return {name: as_data(value) for name, value in found._asdict().items()}
    return [as_data(one) for one in found] if isinstance(found, list) else found


def write_json(found: Any) -> None:
    """Write JSON, which a terminal can show, too."""
    click.echo(to_json(found, indent=2, default=str))


def write_json_rows(rows: Iterable[Any]) -> None:
    """Write a JSON list with a line for each of its elements: fast, and good for ``grep``."""
    lines = ",\n ".join(to_json(row, default=str) for row in rows)
    click.echo(f"[{lines}]")


def write_table(
    headings: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    spare: Sequence[str] = (),
    cut: Sequence[str] = (),
) -> None:
    """
    Write rows under headings, in columns; each cell is made plain.

    On a terminal that is too narrow, some columns are left out, and some are cut.

    Args:
        headings: A heading for each column.
        rows: The cells.
        spare: Headings of columns that may be left out, the first one first.
        cut: Headings of columns that may be cut after that, the widest one first.
    """
    width = shutil.get_terminal_size().columns if is_terminal() else None
    click.echo("\n".join(table(headings, rows, spare=spare, cut=cut, width=width)))


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    spare: Sequence[str],
    cut: Sequence[str],
    width: int | None,
) -> list[str]:
    """Return the lines of a table that is *width* columns wide at most; see :func:`write_table`."""
    columns: list[Sequence[str]] = [
        [heading, *map(plain, cells)] for heading, *cells in zip(headings, *rows, strict=True)
    ]
    if width is not None:
        columns = fitted(columns, width, spare, cut)
    widths = [max(map(len, column)) for column in columns]
    form = (BETWEEN * " ").join(f"{{:<{width}}}" for width in widths)
    return [form.format(*row).rstrip() for row in zip(*columns, strict=True)]


def is_terminal() -> bool:
    """Tell whether a person reads the output, on a terminal of some width."""
    return sys.stdout.isatty()


def fitted(
    columns: Sequence[Sequence[str]], width: int, spare: Sequence[str], cut: Sequence[str]
) -> list[Sequence[str]]:
    """Make columns, each with its heading, fit in a width; see :func:`write_table`."""
    kept = list(columns)
    widths = {column[0]: max(map(len, column)) for column in kept}

    def excess() -> int:
        return sum(widths.values()) + BETWEEN * (len(widths) - 1) - width

    for heading in spare:
        if excess() > 0:
            del widths[heading]
    while excess() > 0:
        widest = max(cut, key=lambda heading: widths[heading])
        if widths[widest] <= LEAST:
            break
        widths[widest] -= 1
    return [
        [
            one if len(one) <= widths[column[0]] else f"{one[: widths[column[0]] - 1]}…"
            for one in column
        ]
        for column in kept
        if column[0] in widths
    ]
