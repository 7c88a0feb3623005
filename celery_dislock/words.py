"""Times in words, for messages and tools."""

from __future__ import annotations

RENEWED = 0.5  # seconds by which a renewal is later than the acquisition; the first is much later


def for_people(seconds: float | None) -> str:
    """Write a time as people say it: ``4.2 s``, ``12 min``, ``3 h 05 min``, ``2 d 3 h``."""
    if seconds is None:
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
