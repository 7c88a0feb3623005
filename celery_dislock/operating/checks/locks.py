"""Examine the locks: leases of the dead, lines that nobody serves, what was set aside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_dislock.exceptions import DamagedLockError
from celery_dislock.operating.checks.table import Row, note, number, ok, serious, some, warning
from celery_dislock.parking.identity import StoreIdentity
from celery_dislock.scripts.names import sweep_lock
from celery_dislock.servers.view import REPEAT, differing, is_beat
from celery_dislock.words import for_people

if TYPE_CHECKING:
    from collections.abc import Iterator

    from celery_dislock.operating.checks.facts import Facts
    from celery_dislock.operating.checks.table import Finding
    from celery_dislock.servers.view import LockState

HELD_LONG = 20  # timeouts, while others wait: ten minutes, unless a task has another timeout
STUCK_LONG = 5.0  # seconds since the first in line has come
TURNS_MANY = 3  # turns that a parked task has not claimed
LATELY = 600.0  # seconds: a task that has its turn elsewhere comes more often


def _held_long(lock: LockState, _: Facts) -> str:
    """Say who holds a lock for which others wait, if the body may hang; a beat leads for long."""
    bodies = [one for one in lock.holders if not is_beat(one)]
    long = [one for one in bodies if one.timeout and one.held > HELD_LONG * one.timeout]
    return "; ".join(
        f"for {for_people(one.held)} by {one.who}, with {lock.waiting} waiting"
        for one in (long if lock.waiting else [])
    )


def _unclaimed(lock: LockState, _: Facts) -> str:
    """Name the parked tasks that do not claim their turns: nobody may consume their queues."""
    return some(
        f"ticket {one.ticket}, queue {one.routing_key or '?'}"
        for one in (*lock.turns, *lock.line)
        if one.turns >= TURNS_MANY
    )


def _stuck(lock: LockState, _: Facts) -> str | None:
    """Each release hands the lock on; the first in line may have come a moment ago."""
    first = lock.line[0].waiting if lock.is_stuck and lock.line else 0.0
    return f"the first waits for {for_people(first)}" if first > STUCK_LONG else None


def _leaderless(lock: LockState, _: Facts) -> str | None:
    return f"last tick {for_people(lock.ticked or 0.0)} ago" if lock.is_leaderless else None


def _reserved(lock: LockState, _: Facts) -> str | None:
    """Find a reservation of which half is over, and the message has not come."""
    one = lock.reservation
    if one is None or one.state != "waiting" or one.since <= one.remaining:
        return None
    return f"for {for_people(one.since)}"


def _limited(lock: LockState, _: Facts) -> str | None:
    if lock.limit is None:
        return None
    known = (
        f"to {lock.limit} at a time" if lock.limit else "paused",
        lock.limit_note,
        f"for {for_people(lock.limit_age)} so far",
        f"{lock.waiting} waiting" if lock.waiting else "",
    )
    return "; ".join(filter(None, known))


ROWS = (
    Row(
        "leases",
        warning,
        lambda lock, _: lock.is_overdue,
        "Leases that missed two renewals, because the process is dead, stopped or cut off",
        "They end by themselves, after their timeout. To end one now: celery dislock free KEY",
    ),
    Row(
        "leases",
        warning,
        _held_long,
        "Held unusually long while others wait",
        "If its body hangs: celery dislock free --terminate KEY. A task that takes that long on "
        "purpose is best given a time limit, and max_renew_times.",
    ),
    Row(
        "beats",
        warning,
        _leaderless,
        "No beat leads, so nothing of these schedules is sent",
        "Start beats with --dislock. If some run, their logs say why they stand by. If beats "
        "without --dislock send instead, delete the key :beat of the lock in Redis.",
    ),
    Row(
        "lines",
        warning,
        _unclaimed,
        f"Parked tasks that had {TURNS_MANY} or more turns, and did not claim them",
        "No worker consumes the queue, or it cannot run them: look at its log. To end one: celery "
        "dislock drop TICKET",
    ),
    Row(
        "lines",
        warning,
        _stuck,
        "Lines of locks that nobody holds",
        "A worker with --dislock goes on with the line at its next sweep, within a third of the "
        "timeout: look again then. To let it go on now: celery dislock resume KEY",
    ),
    Row(
        "set aside",
        warning,
        lambda lock, _: lock.aside and number(lock.aside, "task"),
        "Parked tasks that could not be read or run were set aside",
        "When a worker can run them: celery dislock put-back KEY. See the page Operate it, Tasks "
        "that were set aside.",
    ),
    Row(
        "reservations",
        note,
        _reserved,
        "Reserved for long, for a message that has not come",
        "It may wait in a queue still, or for its countdown. If it was purged, end the "
        "reservation: celery dislock free KEY. Otherwise it ends by itself after lock_unique_for.",
    ),
    Row(
        "limits",
        warning,
        lambda lock, _: lock.limit_differs and differing(lock),
        "Independent lock servers disagree about a pause or a limit. When another of them is away, "
        "that decides who gets the lock",
        f"{REPEAT}: celery dislock resume KEY",
    ),
    Row(
        "limits",
        note,
        _limited,
        "Paused or limited by somebody",
        "To take it back: celery dislock resume KEY",
    ),
)


def is_suspect(lock: LockState, facts: Facts) -> bool:
    """Tell whether something may be wrong with a lock, so that it is remembered."""
    return bool(lock.waiting) or any(row.is_so(lock, facts) for row in ROWS)


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
    for row in ROWS:
        yield from row.finds({lock.key: lock for lock in facts.locks.suspects}, facts)


def unswept(facts: Facts) -> Iterator[Finding]:
    """Find lines that no worker sweeps.  A round trip."""
    parked = (one for lock in facts.locks.suspects for one in lock.line if one.parked)
    if not any(one.broker in {None, facts.home} for one in parked):
        return
    if not facts.overview.lock(sweep_lock(facts.prefix, facts.home)).holders:
        yield warning(
            "Nobody sweeps the lines of this app's broker: a line stands still if the holder of "
            "its lock dies.",
            "Start a worker with --dislock on that broker. After a worker has ended, the next one "
            "takes over within a third of the timeout: then look again.",
        )


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


CHECKS = (("locks", counted), ("locks", suspects), ("sweep", unswept), ("lines", strangers))
