"""``celery dislock top``: what ``ls`` lists, live, as far as it fits on the screen."""

from __future__ import annotations

import heapq
import sys
import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from celery_dislock.exceptions import StoreError
from celery_dislock.operating.cli.reading import (
    LISTED,
    LISTED_CUT,
    LISTED_SPARE,
    Damaged,
    found,
    rank,
    rows_of,
)
from celery_dislock.operating.cli.session import session, table
from celery_dislock.words import plain

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from celery_dislock.operating.cli.session import Session
    from celery_dislock.servers.view import LockState

LOG_WIDTH, LOG_HEIGHT = 160, 40  # columns and rows if the output is not a terminal
PAUSE = 4  # minimum pause after a look, in times of what the look took
COUNTED = ("held", "leases", "waiting", "reserved", "paused", "limited", "set aside", "unreadable")


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
    """Watch the locks: those in trouble first, then the longest lines and the longest held.

    Press Ctrl-C to end.  Without a terminal, one screen is written, as with --once.  For programs
    there is ls --json.  Needs rich: pip install "celery-dislock[cli]"
    """
    try:
        from rich.console import Console  # noqa: PLC0415 -- optional
        from rich.live import Live  # noqa: PLC0415 -- as above
        from rich.text import Text  # noqa: PLC0415 -- as above
    except ImportError as exc:
        needed = 'celery dislock top needs rich: pip install "celery-dislock[cli]"'
        raise click.ClickException(needed) from exc
    console = Console(file=sys.stdout)
    with session(context) as opened:
        if once or not console.is_terminal:
            size = console.size if console.is_terminal else (LOG_WIDTH, LOG_HEIGHT)
            click.echo("\n".join(screen(opened, *size)))
            return
        look = screen(opened, *console.size)  # a server that is away ends the command
        live = Live(console=console, screen=True, auto_refresh=False)
        with live, suppress(KeyboardInterrupt):
            while True:
                began = time.monotonic()
                try:
                    look = screen(opened, *console.size)
                except StoreError as exc:
                    look = [head(opened), plain(exc), *look[2:]]
                text = Text("\n".join(look), no_wrap=True, overflow="ellipsis")
                live.update(text, refresh=True)
                time.sleep(max(interval, PAUSE * (time.monotonic() - began)))


def head(opened: Session) -> str:
    """Return the first line: where the locks are, and what time it is."""
    where = f"{opened.process.store.server}, prefix {opened.runtime.settings.dislock_prefix}"
    return f"{plain(where)}   {time.strftime('%H:%M:%S')}"


def screen(opened: Session, width: int, height: int) -> Sequence[str]:
    """
    Look at all locks, and return the lines of a screen.

    Raises:
        StoreError: The lock server did not answer.
    """
    counts = Counter(dict.fromkeys(COUNTED, 0))
    failed: list[StoreError] = []

    def counted() -> Iterator[LockState | Damaged]:
        for lock in found(opened, failed=failed):
            if isinstance(lock, Damaged):
                counts["unreadable"] += 1
            else:
                counts.update(
                    {"set aside": lock.aside},
                    held=bool(lock.holders),
                    leases=len(lock.holders),
                    waiting=lock.waiting,
                    reserved=lock.reservation is not None,
                    paused=lock.is_paused,
                    limited=bool(lock.limit),
                )
            yield lock

    first = heapq.nsmallest(height, counted(), key=_order)
    rows = [row for lock in first for row in rows_of(lock)]
    lines = [
        head(opened),
        "   ".join(f"{what} {many}" for what, many in counts.items()),
        *map(plain, failed),
        "",
        *table([*LISTED], rows, spare=LISTED_SPARE, cut=LISTED_CUT, width=width),
    ]
    return lines[:height]


def _order(lock: LockState | Damaged) -> tuple[int, int, float]:
    if isinstance(lock, Damaged):
        return (rank(lock), 0, 0.0)
    return (rank(lock), -lock.waiting, -max((one.held for one in lock.holders), default=0.0))
