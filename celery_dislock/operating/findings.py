"""What an examination finds, how serious it is, and what to do about it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

OK = "ok"
NOTE = "note"  # good to know
WARNING = "warning"  # tasks may wait, or do less than was meant
SERIOUS = "serious"  # tasks do not run, run twice, or get lost
LEVELS = (SERIOUS, WARNING, NOTE, OK)

NAMED = 5  # names that a text gives
LISTED = 100  # names that a finding carries


class Finding(NamedTuple):
    """
    One finding.

    Attributes:
        check: Name of the check.
        level: One of :data:`LEVELS`.
        what: What was found.
        remedy: What to do about it; empty: nothing.
        about: The keys, tasks, workers or servers that it is about; the first of them.
    """

    check: str
    level: str
    what: str
    remedy: str = ""
    about: Sequence[str] = ()


def _finding(level: str, what: str, remedy: str = "", about: Iterable[str] = ()) -> Finding:
    return Finding("", level, what, remedy, sorted(set(about))[:LISTED])


serious, warning, note, ok = (partial(_finding, level) for level in LEVELS)


def some(names: Iterable[str]) -> str:
    """Name some of many: the first five in order, and how many others there are."""
    known = sorted(set(names))
    more = f" and {len(known) - NAMED} others" if len(known) > NAMED else ""
    return ", ".join(known[:NAMED]) + more


def number(many: int, what: str) -> str:
    """Write a number of things: ``1 lease``, ``2 leases``."""
    return f"{many} {what}{'' if many == 1 else 'es' if what.endswith('s') else 's'}"
