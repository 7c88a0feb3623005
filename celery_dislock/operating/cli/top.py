"""``celery dislock top``: what ``ls`` lists, live, as far as it fits on the screen."""

from __future__ import annotations

import heapq
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from celery_dislock.exceptions import StoreError
from celery_dislock.operating.cli.reading import LISTED
from celery_dislock.operating.cli.session import session
from celery_dislock.operating.cli.table import columns, table
from celery_dislock.operating.web.listing import listing

if TYPE_CHECKING:
    from celery_dislock.operating.locks import AppLocks

LOG_HEIGHT = 40  # rows if the output is not a terminal
HEAD = 4  # rows of a screen above the locks
PAUSE = 4  # minimum pause after a look, in times of what the look took


@click.command()
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two looks.  If a look takes long, the time is longer.",
)
@click.option("--once", is_flag=True, help="Write one screen, and end.")
@click.pass_context
def top(context: click.Context, interval: float, once: bool) -> None:  # noqa: FBT001 -- click's
    """Watch the locks live, those in trouble first.

    The longest lines come next, then what is held longest.

    Press Ctrl-C to end.  Without a terminal, one screen is written, as with --once.  For programs
    there is ls --json.  Needs rich: pip install "celery-dislock[cli]"
    """
    try:
        from rich.console import Console, Group  # noqa: PLC0415 -- optional
        from rich.live import Live  # noqa: PLC0415 -- as above
    except ImportError as exc:
        needed = 'celery dislock top needs rich: pip install "celery-dislock[cli]"'
        raise click.ClickException(needed) from exc
    console = Console(file=sys.stdout)
    if not console.is_terminal:
        console = Console(file=sys.stdout, width=columns(), height=LOG_HEIGHT)
    with session(context) as opened:
        shown = screen(opened, *console.size)  # a server that is away ends the command
        if once or not console.is_terminal:
            console.print(Group(_head(opened), *shown))
            return
        live = Live(console=console, screen=True, auto_refresh=False)
        with live, suppress(KeyboardInterrupt):
            while True:
                began = time.monotonic()
                error = []
                try:
                    shown = screen(opened, *console.size)
                except StoreError as exc:
                    error = [_line(str(exc))]
                live.update(Group(_head(opened), *error, *shown), refresh=True)
                time.sleep(max(interval, PAUSE * (time.monotonic() - began)))


def screen(opened: AppLocks, width: int, height: int) -> list[Any]:
    """
    Look at all locks, and return what rich shows of them below the first line.

    Raises:
        StoreError: The lock server did not answer.
    """
    failed: list[StoreError] = []
    found = listing(opened.site, failed)
    first = heapq.nsmallest(
        max(height - HEAD, 1), found.rows, key=lambda row: (row.rank, -row.waiting, -row.longest)
    )
    counts = "   ".join(f"{what} {many}" for what, many in found.totals.items())
    rows = table(LISTED, ((row,) for row in first), width)
    return [*map(_line, (counts, *map(str, failed), "", *rows))]


def _head(opened: AppLocks) -> Any:
    """Return the first line: where the locks are, and what time it is."""
    where = f"{opened.process.store.server}, prefix {opened.runtime.settings.dislock_prefix}"
    return _line(f"{where}   {time.strftime('%H:%M:%S')}")


def _line(text: str) -> Any:
    """Return a text of one line, without markup, that is cut where it is too long."""
    from rich.text import Text  # noqa: PLC0415 -- optional

    return Text(text, no_wrap=True, overflow="ellipsis")
