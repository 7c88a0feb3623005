"""``celery dislock top``: a live view of the locks that are held longest, and the longest lines.

Keys and task names come from messages, and may contain what rich or a terminal takes for a command.
All of them are shown as plain text, without markup and without control characters.
"""

from __future__ import annotations

import heapq
import os
import select
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from celery_dislock.exceptions import DamagedLockError, StoreError
from celery_dislock.operating.cli.session import as_json, session, write_json
from celery_dislock.words import for_people, plain

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from celery_dislock.operating.cli.session import Session
    from celery_dislock.servers.overview import Overview
    from celery_dislock.servers.view import Holder, LockState

ROWS_LEAST = 3  # of each table, however low the terminal is
NARROW = 80  # columns below which two of the times are left out
LOG_WIDTH = 120  # columns if the output is not a terminal
LOG_HEIGHT = 40
JSON_ROWS = 20
BESIDE = 8  # rows for the headings, the figures and the last line
SHARE = 4  # times as long as a look takes is the pause after it, at least


@dataclass
class Screen:
    """
    What one look at all locks has found.

    Attributes:
        error: What is wrong with one server of several.
        held: The leases that are held longest, with their locks.
        lines: The locks with the longest lines.
    """

    took: float = 0.0
    locks: int = 0
    leases: int = 0
    waiting: int = 0
    reserved: int = 0
    paused: int = 0
    limited: int = 0
    aside: int = 0
    unread: int = 0
    error: str = ""
    held: Sequence[tuple[Holder, LockState]] = field(default_factory=list)
    lines: list[LockState] = field(default_factory=list)


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
@as_json
@click.pass_context
def top(
    context: click.Context,
    interval: float,
    once: bool,  # noqa: FBT001 -- click's flag
    json_: bool,  # noqa: FBT001 -- click's flag
) -> None:
    """Watch the locks that are held longest, and the longest lines.

    Press q or Ctrl-C to end.  Without a terminal, one screen is written, as with --once, and with
    --json one look, for programs.  Needs rich: pip install "celery-dislock[cli]"
    """
    if json_:
        with session(context) as opened:
            write_json(as_dict(look(opened.overview, JSON_ROWS)))
        return
    rich = _rich()
    with session(context) as opened:
        console = rich.Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
        if once or not console.is_terminal:
            if not console.is_terminal:
                console.size = rich.Size(LOG_WIDTH, LOG_HEIGHT)
            rows = _rows(console.size.height)
            screen = look(opened.overview, rows)
            console.print(_drawn(rich, opened, screen, "", console.size.width))
            return
        _watch(rich, opened, console, interval)


def as_dict(screen: Screen) -> dict[str, Any]:
    """Return a look as JSON has it."""
    figures = {name: value for name, value in vars(screen).items() if isinstance(value, int)}
    return {
        **figures,
        "error": screen.error or None,
        "held_longest": [{"key": lock.key, **one._asdict()} for one, lock in screen.held],
        "longest_lines": [
            {
                "key": lock.key,
                "waiting": lock.waiting,
                "paused": lock.limit == 0,
                "first": lock.line[0]._asdict() if lock.line else None,
            }
            for lock in screen.lines
        ],
    }


class _Rich:
    """The parts of rich that are used here."""

    def __init__(self) -> None:
        from rich.console import Console, Group  # noqa: PLC0415 -- optional
        from rich.console import ConsoleDimensions as Size  # noqa: PLC0415
        from rich.live import Live  # noqa: PLC0415
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        self.Console, self.Group, self.Size = Console, Group, Size
        self.Live, self.Table, self.Text = Live, Table, Text


def _rich() -> _Rich:
    try:
        return _Rich()
    except ImportError as exc:
        told = 'celery dislock top needs rich: pip install "celery-dislock[cli]"'
        raise click.ClickException(told) from exc


def _rows(height: int) -> int:
    """Return the rows of each table on a terminal of this height."""
    return max(ROWS_LEAST, (height - BESIDE) // 2)


def look(overview: Overview, rows: int) -> Screen:
    """
    Look at all locks.  Blocks for a round trip per hundred locks, and one per line that is shown.

    Args:
        overview: Reads the locks.
        rows: Number of leases and of lines to show.

    Raises:
        StoreError: The lock server did not answer.
    """
    began = time.monotonic()
    screen = Screen()
    held: list[tuple[float, int, Holder, LockState]] = []
    lines: list[tuple[int, int, LockState]] = []
    number = 0  # breaks ties
    failed: list[StoreError] = []
    for lock in overview.locks(failed=failed):
        if isinstance(lock, StoreError):
            screen.unread += 1
            continue
        screen.locks += bool(lock.holders)
        screen.leases += len(lock.holders)
        screen.waiting += lock.waiting
        screen.aside += lock.aside
        screen.reserved += lock.reservation is not None
        screen.paused += lock.limit == 0
        screen.limited += bool(lock.limit)
        for holder in lock.holders:
            number += 1
            _keep(held, rows, (holder.held, -number, holder, lock))
        if lock.waiting:
            number += 1
            _keep(lines, rows, (lock.waiting, -number, lock))
    screen.held = [(holder, lock) for _, _, holder, lock in sorted(held, reverse=True)]
    longest = [lock for _, _, lock in sorted(lines, reverse=True)]
    screen.lines = []
    for lock in longest:
        try:
            screen.lines.append(overview.lock(lock.name, most=1))
        except DamagedLockError:  # since it was looked at, or its line alone
            screen.unread += 1
    screen.error = str(failed[0]) if failed else ""
    screen.took = time.monotonic() - began
    return screen


def _keep(heap: list[Any], most: int, entry: Any) -> None:
    """Keep the largest entries; their first two parts differ between any two."""
    if len(heap) < most:
        heapq.heappush(heap, entry)
    else:
        heapq.heappushpop(heap, entry)


def _watch(rich: _Rich, opened: Session, console: Any, interval: float) -> None:
    overview = opened.overview
    screen = look(overview, _rows(console.size.height))  # a server that is away ends the command
    keys = sys.stdin if sys.stdin.isatty() else None
    drawn = _drawn(rich, opened, screen, "", console.size.width)
    with (
        _keys_at_once(keys),
        rich.Live(drawn, console=console, screen=True, auto_refresh=False) as live,
    ):
        try:
            while not _quits(keys, max(interval, screen.took * SHARE)):
                error = ""
                try:
                    screen = look(overview, _rows(console.size.height))
                except StoreError as exc:
                    error = str(exc)
                drawn = _drawn(rich, opened, screen, error, console.size.width)
                live.update(drawn, refresh=True)
        except KeyboardInterrupt:
            pass


@contextmanager
def _keys_at_once(keys: Any) -> Iterator[None]:
    """Have the terminal tell each key when it is pressed, and not show it."""
    try:
        import termios  # noqa: PLC0415 -- not on Windows
        import tty  # noqa: PLC0415
    except ImportError:  # pragma: no cover -- Windows
        yield
        return
    if keys is None:
        yield
        return
    before = termios.tcgetattr(keys)
    try:
        tty.setcbreak(keys)
        yield
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)


def _quits(keys: Any, seconds: float) -> bool:
    """Wait; return True as soon as q is pressed."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if keys is None:
            time.sleep(left)
        elif select.select([keys], [], [], left)[0]:
            pressed = os.read(keys.fileno(), 64)
            if not pressed or set(pressed) & set(b"qQ\x03\x04"):
                return True
    return False


def _drawn(rich: _Rich, opened: Session, screen: Screen, error: str, width: int) -> Any:
    narrow = width < NARROW
    text = rich.Text
    prefix = opened.runtime.settings.dislock_prefix
    server = opened.process.store.server
    head = f"{server}, prefix {prefix}   {time.strftime('%H:%M:%S')}"
    figures = [
        (screen.locks, "held"),
        (screen.leases, "leases"),
        (screen.waiting, "waiting"),
        (screen.reserved, "reserved"),
        (screen.paused, "paused"),
        (screen.limited, "limited"),
        (screen.aside, "set aside"),
        (screen.unread, "unreadable"),
    ]
    told = "   ".join(f"{what} {many}" for many, what in figures)
    times = () if narrow else (("RENEWED", 0), ("LEFT", 0))
    held = _table(rich, ("KEY", 3), ("HELD FOR", 0), *times, ("BY", 4))
    for holder, lock in screen.held:
        renewed = "-" if holder.renewed is None else f"{for_people(holder.renewed)} ago"
        who = f"{holder.who}{', left to expire' if holder.expiring else ''}"
        more = () if narrow else (renewed, for_people(holder.remaining))
        _row(rich, held, lock.key, for_people(holder.held), *more, who)
    lines = _table(rich, ("KEY", 3), ("WAITING", 0), ("FIRST FOR", 0), ("FIRST", 4))
    for lock in screen.lines:
        first = lock.line[0] if lock.line else None
        paused = "  paused" if lock.limit == 0 else ""
        _row(
            rich,
            lines,
            lock.key,
            f"{lock.waiting}{paused}",
            for_people(first.waiting) if first else "-",
            first.who if first else "-",
        )
    return rich.Group(
        text(plain(head), style="bold", no_wrap=True, overflow="ellipsis"),
        text(told, no_wrap=True, overflow="ellipsis"),
        text(plain(error or screen.error), style="red"),
        held,
        text(""),
        lines,
    )


def _table(rich: _Rich, *columns: tuple[str, int]) -> Any:
    table = rich.Table(box=None, expand=True, padding=(0, 2, 0, 0), header_style="reverse")
    for heading, ratio in columns:
        table.add_column(rich.Text(heading), ratio=ratio or None, no_wrap=True, overflow="ellipsis")
    return table


def _row(rich: _Rich, table: Any, *cells: str) -> None:
    table.add_row(*(rich.Text(plain(cell)) for cell in cells))
