"""Examine the locks of an app: their server, the workers, and the locks themselves.

Each check is a function of its own, in :mod:`celery_dislock.operating.checks`, and returns
findings.  Nothing is changed but a key of doctor's own, which is gone again, and no command is sent
that blocks the server.  If the lock server is away, what the workers tell is judged nevertheless.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from celery_dislock.config.options import TaskOptions
from celery_dislock.exceptions import StoreError
from celery_dislock.operating.checks import locks, server, stores, workers
from celery_dislock.operating.findings import LEVELS, NOTE, SERIOUS, Finding
from celery_dislock.operating.overview import Overview

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from celery_dislock.operating.checks.workers import Fleet
    from celery_dislock.servers.server import Server


class Examined(NamedTuple):
    """
    The result of an examination.

    Attributes:
        findings: All findings, the most serious first.
        away: Whether the lock server did not answer.
    """

    findings: Sequence[Finding]
    away: bool

    @property
    def serious(self) -> bool:
        """Whether a finding is serious."""
        return any(one.level == SERIOUS for one in self.findings)


class Asking(NamedTuple):
    """
    What an examination asks the broker and the workers.

    Attributes:
        fleet: What the workers have answered.
        known: Asks the workers which of these task ids they know.
        empty: Asks the broker whether all queues are empty; returns None if that is not known.
    """

    fleet: Fleet
    known: Callable[[Sequence[str]], set[str]]
    empty: Callable[[], bool | None]


class Place(NamedTuple):
    """
    Where the locks are.

    Attributes:
        server: The lock server.
        prefix: ``dislock_prefix``.
        home: Name of the app's broker in Redis; empty if the server keeps no lines.
        min_replicas: ``dislock_min_replicas``.
    """

    server: Server
    prefix: str
    home: str
    min_replicas: int


def examine(place: Place, ours: Mapping[str, Any], asking: Asking) -> Examined:
    """
    Examine everything.  Blocks for the round trips of all checks.

    Args:
        place: Where the locks are.
        ours: What the app here tells of its locks; see :mod:`celery_dislock.operating.about`.
        asking: Asks the broker and the workers.
    """
    fleet = asking.fleet
    sides = [ours, *fleet.locking.values()]
    found = server.members(place.server)
    away = any(
        one.level == SERIOUS and "is away" in one.what
        for one in server.answering(place.server, found)
    )
    findings = list(workers.about(ours, fleet))
    parked = False
    if not away:
        try:
            seen, more = _of_locks(place, sides, asking)
            findings += more
            parked = any(one.parked for lock in seen.lines for one in lock.line)
        except StoreError as exc:
            findings.append(Finding("locks", NOTE, f"The locks could not be looked at: {exc}"))
        findings += server.rights(place.server, place.prefix)
        findings += server.writes(place.server, place.prefix)
    findings += server.sentinels(place.server)
    may_park = place.server.keeps_lines and (parked or workers.parks(sides))
    findings += server.about(place.server, found, parks=may_park, min_replicas=place.min_replicas)
    return Examined(sorted(findings, key=lambda one: LEVELS.index(one.level)), away)


def _of_locks(
    place: Place, sides: Sequence[Mapping[str, Any]], asking: Asking
) -> tuple[locks.Seen, list[Finding]]:
    overview, fleet = Overview(place.server, place.prefix), asking.fleet
    seen = locks.look(overview, fleet, _old(sides))
    empty = asking.empty() if seen.reserved else None
    return seen, [
        *locks.counted(seen),
        *locks.leases(seen, fleet),
        *locks.held_long(seen),
        *locks.lines(seen, fleet),
        *locks.stuck(seen),
        *locks.sweeps(place.server, overview, place.prefix, place.home, seen),
        *_elsewhere(place, overview),
        *locks.aside(seen),
        *locks.reservations(seen, fleet, asking.known, empty=empty),
        *locks.limits(seen, fleet),
    ]


def _elsewhere(place: Place, overview: Overview) -> Iterator[Finding]:
    if place.server.keeps_lines:
        yield from stores.strangers(place.server, place.prefix)
        yield from stores.other_prefixes(place.server, overview, place.prefix, place.home)


def _old(sides: Sequence[Mapping[str, Any]]) -> float:
    """Return the age from which a reservation is old, by the tasks that are known."""
    known = [
        float(options.get("lock_unique_for", TaskOptions.lock_unique_for))
        for told in sides
        for options in told["tasks"].values()
        if "lock_unique_until" in options
    ]
    return locks.RESERVED_LONG * min(known, default=TaskOptions.lock_unique_for)
