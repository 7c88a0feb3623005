"""Checks, and what they find.

A check is a row of a table: what it is about, how serious it is, what makes it so, and the words.
What a row cannot say is a function that yields findings.  The name of a check is that of its
findings, and of its row in the documentation.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from celery_dislock.words import some

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

OK = "ok"
NOTE = "note"  # good to know
WARNING = "warning"  # tasks may wait, or do less than was meant
SERIOUS = "serious"  # tasks do not run, run twice, or get lost
LEVELS = (SERIOUS, WARNING, NOTE, OK)

ABOUT_MOST = 100  # names that a finding carries


class Finding(NamedTuple):
    """
    One finding.

    Attributes:
        check: Name of the check.
        level: One of :data:`LEVELS`.
        what: What was found.
        remedy: What to do about it; empty: nothing.
        about: The keys, tasks, workers or servers that it is about: the first ABOUT_MOST of them.
    """

    check: str
    level: str
    what: str
    remedy: str = ""
    about: Sequence[str] = ()


def _finding(level: str, what: str, remedy: str = "", about: Iterable[str] = ()) -> Finding:
    return Finding("", level, what, remedy, sorted(set(about))[:ABOUT_MOST])


serious, warning, note, ok = (partial(_finding, level) for level in LEVELS)


class Row(NamedTuple):
    """
    A check of each lock, worker or process of the lock server.

    Attributes:
        check: The check's name.
        finding: Makes the finding: :data:`serious`, :data:`warning` or :data:`note`.
        is_so: Tells whether something is so of one of them, with what is known beside it; a text
            says more of it.
        what: What is wrong, before the names.
        remedy: What to do about it.
        name: The name of a lock's trouble in lists; empty: it is none.
    """

    check: str
    finding: Callable[..., Finding]
    is_so: Callable[[Any, Any], Any]
    what: str
    remedy: str
    name: str = ""

    def finds(self, things: Mapping[str, Any], facts: Any) -> Iterator[Finding]:
        """Yield what is found of these, by their names."""
        found = {name: so for name, thing in things.items() if (so := self.is_so(thing, facts))}
        if found:
            yield self.of({name: "" if so is True else str(so) for name, so in found.items()})

    def of(self, found: Mapping[str, str]) -> Finding:
        """Make the finding for these names; a text that is not empty says more of one."""
        named = (f"{name} ({more})" if more else name for name, more in found.items())
        what = f"{self.what}: {some(named)}."
        return self.finding(what, self.remedy, found)._replace(check=self.check)


def number(many: int, what: str) -> str:
    """Write a number of things: ``1 lease``, ``2 leases``."""
    return f"{many} {what}{'' if many == 1 else 's'}"
