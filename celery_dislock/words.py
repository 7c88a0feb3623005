"""Times and names in words, text that others have written, and JSON: for people and tools."""

from __future__ import annotations

import json
import math
import re
import shlex
import time
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

SECONDS_MOST = 10.0**12  # seconds; a longer time comes from a damaged record
TODAY = 12 * 3600.0  # seconds within which a time needs no date
NAMED = 5  # names that a text gives if there are many
TEXT_MOST = 1000  # characters of a name, an id or a note that others have written
RENEWED = 0.5  # seconds: a lease renewed no later than this after its acquisition counts as new


def for_people(seconds: float | None) -> str:
    """Write a time as people say it: ``4.2 s``, ``12 min``, ``3 h 05 min``, ``2 d 3 h``."""
    if seconds is None or not -SECONDS_MOST < seconds < SECONDS_MOST:  # also refuses NaN
        return "?"
    if seconds < 10:  # noqa: PLR2004 -- below that the tenths count
        return f"{max(seconds, 0.0):.1f} s"
    if seconds < 120:  # noqa: PLR2004 -- two minutes
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    if minutes < 60:  # noqa: PLR2004
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:  # noqa: PLR2004 -- two days
        return f"{hours} h {minutes:02} min"
    return f"{hours // 24} d {hours % 24} h"


def time_of_day(unix_time: float) -> str:
    """Write a time as a clock here shows it: ``14:03:20 CET``, with the date if that is far."""
    shown = "%H:%M:%S %Z" if abs(unix_time - time.time()) < TODAY else "%Y-%m-%d %H:%M:%S %Z"
    try:
        return datetime.fromtimestamp(unix_time).astimezone().strftime(shown)
    except (ValueError, OverflowError, OSError):
        return "?"


def so_far(held_for: float | None, renewed: float | None = None) -> str:
    """
    Write how long a lock has been held, to follow the holder: ``, for 12 min so far``.

    Args:
        held_for: Seconds since the acquisition; None if not known, and nothing is written.
        renewed: Seconds since the last renewal; None if not known.
    """
    if held_for is None:
        return ""
    words = f", for {for_people(held_for)} so far"
    if renewed is not None and renewed < held_for - RENEWED:
        words += f", last renewed {for_people(renewed)} ago"
    return words


def some(names: Iterable[str]) -> str:
    """Name some of many: the first five in order, and how many others there are."""
    known = sorted(set(names))
    more = f" and {len(known) - NAMED} others" if len(known) > NAMED else ""
    return ", ".join(known[:NAMED]) + more


def plain(text: object) -> str:
    r"""
    Return text as a terminal, a log or a page can show it; all that is shown to people passes here.

    Keys, ids and names of tasks come from messages.  What moves a cursor, ends a line, turns the
    direction, or cannot be seen or encoded is written as Python writes it: ``\x1b``, ``\u202e``.
    """
    written = str(text)
    if written.isprintable():
        return written
    return "".join(
        character if character.isprintable() else ascii(character)[1:-1] for character in written
    )


def as_argument(text: str) -> str:
    """
    Return text as a shell reads it, for a command that people are told to type.

    A key or an id may come from anybody: ``1|2``, ``$(...)``.
    """
    return shlex.quote(text)


def filled(told: str, **arguments: str) -> str:
    """Put arguments in place of their names in capitals, in a text with a command."""
    return re.sub("|".join(arguments), lambda name: arguments[name[0]], told)


def to_json(data: Any, **how: Any) -> str:
    """Return JSON that every program can read: a number that is not finite becomes null."""
    try:
        return json.dumps(data, allow_nan=False, **how)
    except ValueError:
        return json.dumps(finite(data), allow_nan=False, **how)


def finite(data: Any) -> Any:
    """Return data for JSON with None in place of each number that is not finite."""
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {name: finite(value) for name, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [finite(value) for value in data]
    return data
