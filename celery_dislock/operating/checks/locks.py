"""Examine the locks: what lists call trouble, and what was set."""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_dislock.exceptions import DamagedLockError
from celery_dislock.operating.checks.table import note, number, ok, serious, some, warning
from celery_dislock.operating.checks.troubles import LIMITED, TROUBLES
from celery_dislock.parking.identity import StoreIdentity
from celery_dislock.words import for_people

if TYPE_CHECKING:
    from collections.abc import Iterator

    from celery_dislock.operating.checks.facts import Facts
    from celery_dislock.operating.checks.table import Finding

LATELY = 600.0  # seconds: a task that has its turn elsewhere comes more often


def counted(facts: Facts) -> Iterator[Finding]:
    """Tell how much was looked at, and what could not be."""
    seen = facts.locks
    for error in seen.away:
        yield note(f"The locks of one server could not be looked at: {error}")
    damaged = [one for one in seen.unread if isinstance(one, DamagedLockError)]
    if damaged:
        names = [one.lock for one in damaged]
        yield serious(
            f"Locks that cannot be used, so that their tasks fail: {some(map(repr, names))}. "
            f"{damaged[0].reason}.",
            "See the page Operate it, A damaged lock.",
            names,
        )
    if unread := [one for one in seen.unread if one not in damaged]:
        yield note(f"{number(len(unread), 'lock')} could not be looked at: {unread[-1]}")
    held = f"{number(seen.locks, 'lock')}, {number(seen.leases, 'lease')}"
    yield ok(f"{held}, {seen.waiting} waiting.")


def suspects(facts: Facts) -> Iterator[Finding]:
    """Judge each lock that something may be wrong with."""
    locks = {lock.key: lock for lock in facts.locks.suspects}
    for one in TROUBLES:
        yield from one.row.finds(locks, facts.site)
    yield from LIMITED.finds(locks, facts.site)


def strangers(facts: Facts) -> Iterator[Finding]:
    """Find tasks that come here and have their turn in another store.  A round trip."""
    if not facts.server.keeps_lines:
        return
    came = StoreIdentity(facts.server, facts.prefix).last_stranger()
    if came is not None and came.ago <= LATELY:
        yield warning(
            f"A task came {for_people(came.ago)} ago that is parked on another lock server, or "
            "under another prefix: it was put off.",
            "Workers with the old dislock_url or dislock_prefix run such tasks. If none is left: "
            "celery dislock drain --from-url URL, or --from-prefix PREFIX. If that server has lost "
            f"its data: celery dislock drain --lost {came.store}",
        )


CHECKS = (("locks", counted), ("locks", suspects), ("lines", strangers))
