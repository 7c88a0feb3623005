"""Tables that fit: a row is a line of the terminal, or of 80 columns through a pipe.

A key or an id comes from anybody, with characters that are as wide as two.  What does not fit is
shortened: ids first, as the beginning of one is enough to know it by, then the widest columns.
"""

from __future__ import annotations

import re
import shutil
import textwrap
import unicodedata
from typing import TYPE_CHECKING, Any

from celery_dislock.words import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

COLUMNS = 80  # of a text that goes to no terminal
TEXT_MOST = 100  # columns of a text, if a terminal has them
NARROWEST = 4  # columns of a cell that was cut
NOTHING = "-"  # an empty cell
CUT = ".."  # stands for what was cut: ASCII, which all terminals and files can have
ENDS = {"KEY", "TICKET"}  # columns of which the ends tell as much as the beginnings
GAP = "  "

_ID = re.compile(r"\b([0-9a-f]{8})-?(?:[0-9a-f]{4}-?){3}[0-9a-f]{12}\b")  # or a digest


def columns() -> int:
    """Return how many columns a line may have."""
    return shutil.get_terminal_size((COLUMNS, 0)).columns


def wrapped(text: str, first: str = "", then: str = "") -> str:
    """
    Return a text in lines that fit; a word that is longer than a line, such as a key, stays whole.

    Args:
        text: The text, in one line.
        first: Stands before it.
        then: Stands before each of its other lines.
    """
    return textwrap.fill(
        plain(text),
        min(TEXT_MOST, columns()),
        initial_indent=first,
        subsequent_indent=then,
        break_long_words=False,
        break_on_hyphens=False,
    )


def table(
    cells_of: Mapping[str, Callable[..., object]], rows: Iterable[Any], width: int
) -> list[str]:
    """
    Return the lines of a table, the headings first.

    Args:
        cells_of: What each column makes of a row, by the column's heading.
        rows: The rows.
        width: How many columns of the terminal a line may have.
    """
    kept = list(rows)
    found = [
        [heading, *(plain(cell(row) or NOTHING) for row in kept)]
        for heading, cell in cells_of.items()
    ]
    room = width - len(GAP) * (len(found) - 1)
    found = _shortened(found, room, lambda cells, _: [_ID.sub(rf"\1{CUT}", cell) for cell in cells])
    found = _shortened(found, room, _cut)
    filled = []
    for cells in found:
        wide = _widest(cells)
        filled.append([cell + " " * (wide - width_of(cell)) for cell in cells])
    return [GAP.join(line).rstrip() for line in zip(*filled, strict=True)]


def _shortened(
    found: Sequence[list[str]], room: int, shorten: Callable[[list[str], int], list[str]]
) -> list[list[str]]:
    """Shorten the widest columns if the columns do not fit together."""
    widths = list(map(_widest, found))
    most = max(widths)
    while most > NARROWEST and sum(min(wide, most) for wide in widths) > room:
        most -= 1
    return [
        shorten(cells, most) if wide > most else cells
        for cells, wide in zip(found, widths, strict=True)
    ]


def _widest(cells: Sequence[str]) -> int:
    return max(map(width_of, cells))


def _cut(cells: list[str], most: int) -> list[str]:
    return [cut(cell, most, from_middle=cells[0] in ENDS) for cell in cells]


def width_of(text: str) -> int:
    """Return how many columns of a terminal a text takes, at most."""
    if text.isascii():
        return len(text)
    return sum(map(_width_of_one, text))


def cut(text: str, most: int, *, from_middle: bool = False) -> str:
    """Return a text that takes *most* columns at most, without what does not fit."""
    if width_of(text) <= most:
        return text
    room = most - len(CUT)
    last = room // 3 if from_middle else 0
    tail = _beginning(text[::-1], last)[::-1]
    return f"{_beginning(text, room - last)}{CUT}{tail}"


def _beginning(text: str, most: int) -> str:
    if text.isascii():
        return text[:most]
    taken = 0
    for at, character in enumerate(text):
        taken += _width_of_one(character)
        if taken > most:
            return text[:at]
    return text


def _width_of_one(character: str) -> int:
    if unicodedata.east_asian_width(character) in "WF":
        return 2
    return 0 if unicodedata.combining(character) else 1
