"""Examine the locks: what lists call trouble, and what was set."""

from __future__ import annotations

from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING

from celery_dislock.exceptions import StoreError
from celery_dislock.operating.checks.table import note, number, ok, warning
from celery_dislock.operating.checks.troubles import MENTIONED, TROUBLES
from celery_dislock.scripts.names import index_of_lines
from celery_dislock.servers.server import scan_all
from celery_dislock.words import some

if TYPE_CHECKING:
    from collections.abc import Iterator

    from celery_dislock.operating.checks.facts import Facts
    from celery_dislock.operating.checks.table import Finding


def counted(facts: Facts) -> Iterator[Finding]:
    """Find how many locks there are, and which of them could not be looked at."""
    seen = facts.locks
    for error in seen.away:
        yield note(f"The locks of one server could not be looked at: {error}")
    held = f"{number(seen.locks, 'lock')}, {number(seen.leases, 'lease')}"
    yield ok(f"{held}, {seen.waiting} waiting.")


def troubles(facts: Facts) -> Iterator[Finding]:
    """Tell what lists call trouble, and what was set."""
    found = facts.locks.troubles
    return (row.of(found[row]) for row in (*TROUBLES, *MENTIONED) if row in found)


def other_lines(facts: Facts) -> Iterator[Finding]:
    """Find lines of the app's broker under other prefixes.  Reads the names of all keys."""
    if not facts.server.keeps_lines:
        return
    wanted = index_of_lines("*", facts.broker)
    names: set[str] = set()
    with suppress(StoreError):
        names.update(chain.from_iterable(scan_all(facts.server, wanted, [])))
    prefixes = {name.removesuffix(wanted[1:]) for name in names} - {facts.prefix}
    if prefixes:
        yield warning(
            f"Tasks were parked under other prefixes than {facts.prefix}: {some(prefixes)}.",
            "Workers with another dislock_prefix run them. If none is left: start one until its "
            "lines are empty, see the page Move to another lock server.",
            prefixes,
        )


CHECKS = (("locks", counted), ("locks", troubles), ("lines", other_lines))
