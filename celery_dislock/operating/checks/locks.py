"""Examine the locks themselves: leases of the dead, lines nobody serves, what was set aside.

All locks are read once, in pages, and only those that something may be wrong with are remembered.
A lock changes while it is looked at, so a finding here says what was so a moment ago.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from celery_dislock.exceptions import DamagedLockError, StoreError
from celery_dislock.operating.findings import (
    NAMED,
    NOTE,
    OK,
    SERIOUS,
    WARNING,
    Finding,
    listed,
    number,
    some,
)
from celery_dislock.operating.overview import REPEAT, differing
from celery_dislock.scripts import LINES
from celery_dislock.scripts.names import index_of_lines, store_of, sweep_lock
from celery_dislock.servers.server import scan
from celery_dislock.words import for_people

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from celery_dislock.operating.checks.workers import Fleet
    from celery_dislock.operating.overview import Holder, LockState, Overview, Place
    from celery_dislock.servers.reservations import Record
    from celery_dislock.servers.server import Server

LINES_MOST = 200  # lines that are read place by place
PLACES_MOST = 50  # places of each that are read
ASKED_MOST = 200  # reservations whose ids the workers are asked for
HELD_LONG = 20  # timeouts, while others wait: ten minutes, unless a task has another timeout
STUCK_LONG = 5.0  # seconds since the first in line has come
TURNS_MANY = 3  # turns that a parked task has not claimed

# The time limits and countdowns that a task may have are not known here.
RESERVED_LONG = 1 / 2  # of lock_unique_for


@dataclass
class Seen:
    """What was seen of all locks; lists hold what may be wrong."""

    locks: int = 0
    leases: int = 0
    waiting: int = 0
    dead: list[tuple[str, Holder]] = field(default_factory=list)
    lines: list[LockState] = field(default_factory=list)
    aside: list[tuple[str, int]] = field(default_factory=list)
    reserved: list[tuple[str, Record]] = field(default_factory=list)
    limits: list[LockState] = field(default_factory=list)
    damaged: list[StoreError] = field(default_factory=list)
    failed: list[StoreError] = field(default_factory=list)


def look(overview: Overview, fleet: Fleet, old: float) -> Seen:
    """
    Look at all locks.  Blocks for a round trip per hundred locks, and one per line.

    Args:
        overview: Reads the locks.
        fleet: The workers that answered.
        old: Seconds from which a reservation of a message that waits is suspicious.

    Raises:
        StoreError: No server answered.
    """
    seen = Seen()
    for lock in overview.locks(failed=seen.failed):
        if isinstance(lock, StoreError):
            seen.damaged.append(lock)
            continue
        seen.locks += lock.exists
        seen.leases += len(lock.holders)
        seen.waiting += lock.waiting
        for holder in lock.holders:
            if holder.worker and "@" in holder.worker and holder.worker not in fleet.told:
                seen.dead.append((lock.key, holder))
        if lock.waiting:
            seen.lines.append(lock)
        if lock.aside:
            seen.aside.append((lock.key, lock.aside))
        reserved = lock.reservation
        if reserved and reserved.state == "waiting" and reserved.since > old:
            seen.reserved.append((lock.key, reserved))
        if lock.limit is not None or lock.limit_differs:
            seen.limits.append(lock)
    lines = sorted(seen.lines, key=lambda lock: -lock.waiting)[:LINES_MOST]
    seen.lines = []
    for lock in lines:
        with suppress(StoreError):  # of one node of several
            seen.lines.append(overview.lock(lock.name, most=PLACES_MOST))
    return seen


def counted(seen: Seen) -> Iterator[Finding]:
    """Tell how much was looked at, and what could not be."""
    for error in seen.failed:
        what = f"The locks of one server could not be looked at: {error}"
        yield Finding("locks", NOTE, what)
    damaged = [one for one in seen.damaged if isinstance(one, DamagedLockError)]
    if damaged:
        names = [one.lock for one in damaged]
        yield Finding(
            "locks",
            SERIOUS,
            f"{number(len(damaged), 'lock')} cannot be used, and their tasks fail: "
            f"{some(map(repr, names))}. {damaged[0].reason}.",
            "See the page Operate it, A damaged lock.",
            listed(names),
        )
    unread = len(seen.damaged) - len(damaged)
    if unread:
        what = f"{number(unread, 'lock')} could not be looked at: {seen.damaged[-1]}"
        yield Finding("locks", NOTE, what)
    held = f"{number(seen.locks, 'lock')}, {number(seen.leases, 'lease')}"
    what = f"{held}, {seen.waiting} waiting."
    yield Finding("locks", OK, what)


def leases(seen: Seen, fleet: Fleet) -> Iterator[Finding]:
    """Find leases whose worker does not answer."""
    if fleet.error or not seen.dead:
        return
    renewed = [(key, holder) for key, holder in seen.dead if holder.is_renewed]
    stale = [(key, holder) for key, holder in seen.dead if not holder.is_renewed]
    if stale:
        workers = {str(holder.worker) for _, holder in stale}
        longest = max(holder.remaining for _, holder in stale)
        yield Finding(
            "leases",
            WARNING,
            f"{number(len(stale), 'lease')} of workers that do not answer ({some(workers)}): "
            f"{some(key for key, _ in stale)}.",
            f"If these workers are gone, the leases end by themselves, the last in {longest:.0f} s."
            " To end one now: celery dislock free KEY. A lease with a fixed expiry, and one that "
            "a task left to expire, lasts on purpose.",
            listed(key for key, _ in stale),
        )
    if renewed:
        workers = {str(holder.worker) for _, holder in renewed}
        yield Finding(
            "leases",
            NOTE,
            f"{number(len(renewed), 'lease')} of workers that do not answer ({some(workers)}), and "
            f"that were renewed in time: {some(key for key, _ in renewed)}.",
            "These workers may be alive: another broker, the pool solo, or a warm shutdown. Look "
            "again with --timeout 5, or after the timeout of the lock.",
            listed(key for key, _ in renewed),
        )


def held_long(seen: Seen) -> Iterator[Finding]:
    """Find leases that others have waited for, for long: of a body that hangs, perhaps."""
    found = [
        (lock, holder)
        for lock in seen.lines
        for holder in lock.holders
        if holder.timeout and holder.held > HELD_LONG * holder.timeout
    ]
    if not found:
        return
    longest = sorted(found, key=lambda one: -one[1].held)
    told = [
        f"{lock.key}, held for {for_people(holder.held)} by {holder.who}, with {lock.waiting} "
        "waiting"
        for lock, holder in longest[:NAMED]
    ]
    yield Finding(
        "leases",
        WARNING,
        f"{number(len(longest), 'lease')} held unusually long while others wait: "
        f"{'; '.join(told)}{'; and others' if len(longest) > NAMED else ''}.",
        "If its body hangs: celery dislock free --terminate KEY. A task that takes that long on "
        "purpose is best given a time limit, and max_renew_times.",
        listed(lock.key for lock, _ in longest),
    )


def lines(seen: Seen, fleet: Fleet) -> Iterator[Finding]:
    """Find parked tasks whose messages no worker would consume, and turns nobody claims."""
    unserved: dict[str, list[str]] = {}
    unclaimed, tickets, turns = [], [], []
    for lock in seen.lines:
        for place in (*lock.line, *lock.turns):
            if not place.parked:
                continue
            if place.turns >= TURNS_MANY:
                unclaimed.append(lock.key)
                turns.append(place.ticket)
            if place.routing_key is not None and not _is_consumed(place, fleet):
                unserved.setdefault(place.routing_key or "?", []).append(lock.key)
                tickets.append(place.ticket)
    if unserved and not fleet.error:
        keys = [key for of_queue in unserved.values() for key in of_queue]
        mute = any(holder.is_renewed for _, holder in seen.dead)  # it may consume them
        yield Finding(
            "lines",
            WARNING if mute else SERIOUS,
            f"{number(len(keys), 'parked task')} will go to queues that no worker "
            "that answers consumes "
            f"({some(unserved)}), in the lines of {some(keys)}.",
            "Start a worker for these queues (-Q). To end a parked task: celery dislock drop "
            f"TICKET. Tickets: {some(tickets)}.",
            listed(keys),
        )
    if unclaimed:
        yield Finding(
            "lines",
            WARNING,
            f"{number(len(unclaimed), 'parked task')} had {TURNS_MANY} or more turns, and did not "
            f"claim them: {some(unclaimed)}.",
            "Their messages do not reach a worker, or it cannot run them: look at its log. To end "
            f"one: celery dislock drop TICKET. Tickets: {some(turns)}.",
            listed(unclaimed),
        )


def _is_consumed(place: Place, fleet: Fleet) -> bool:
    for queues in fleet.queues.values():
        for queue in queues:
            exchange = queue.get("exchange") or {}
            if place.exchange in {"", None}:
                if place.routing_key == queue.get("name"):
                    return True
            elif place.exchange == exchange.get("name") and (
                exchange.get("type") != "direct"  # patterns are the broker's business
                or place.routing_key in _keys_of(queue)
            ):
                return True
    return False


def _keys_of(queue: Mapping[str, Any]) -> list[Any]:
    bindings = queue.get("bindings") or []
    return [queue.get("routing_key"), *(one.get("routing_key") for one in bindings)]


def stuck(seen: Seen) -> Iterator[Finding]:
    """Find lines of a lock that nobody holds: each release hands the lock on."""
    found = [
        lock
        for lock in seen.lines
        if lock.is_stuck and lock.line and lock.line[0].waiting > STUCK_LONG
    ]
    if found:
        told = [
            f"{lock.key}, {lock.waiting} waiting, the first for {for_people(lock.line[0].waiting)}"
            for lock in found[:NAMED]
        ]
        yield Finding(
            "lines",
            WARNING,
            f"{number(len(found), 'line')} of locks that nobody holds: {'; '.join(told)}.",
            "A worker with --dislock goes on with the line at its next sweep, within a third of "
            "the timeout: look again then. To let it go on now: celery dislock resume KEY",
            listed(lock.key for lock in found),
        )


def sweeps(
    server: Server, overview: Overview, prefix: str, home: str, seen: Seen
) -> Iterator[Finding]:
    """
    Find lines that no worker sweeps.  A few round trips.

    Args:
        server: The lock server.
        overview: Reads its locks.
        prefix: ``dislock_prefix``.
        home: Name of the broker of the app here.
        seen: What was seen of the locks.
    """
    if not any(place.parked for lock in seen.lines for place in lock.line):
        return
    homes: set[str] = set()
    pattern = index_of_lines(prefix, "")
    with suppress(StoreError):
        for send in server.senders():
            for names in scan(send, f"{pattern}*"):
                homes.update(name.removeprefix(pattern) for name in names)
    homes.discard(store_of("").removeprefix(index_of_lines("", "")))
    unswept = []
    for one in sorted(homes):
        with suppress(StoreError):
            total, *_ = server.run(LINES, [index_of_lines(prefix, one)], b"0", 1)
            if total and not overview.lock(sweep_lock(prefix, one)).holders:
                unswept.append("this app's broker" if one == home else f"the broker {one}")
    if unswept:
        yield Finding(
            "sweep",
            WARNING,
            f"Nobody sweeps the lines of {', '.join(unswept)}: a line stands still if the holder "
            "of its lock dies.",
            "Start a worker with --dislock on that broker. After a worker has ended, the next one "
            "takes over within a third of the timeout: then look again.",
            unswept,
        )


def aside(seen: Seen) -> Iterator[Finding]:
    """Find parked tasks that were set aside."""
    if seen.aside:
        tasks = sum(many for _, many in seen.aside)
        keys = [key for key, _ in seen.aside]
        yield Finding(
            "set aside",
            WARNING,
            f"{number(tasks, 'parked task')} could not be read or run, and "
            f"{'was' if tasks == 1 else 'were'} set aside: {some(keys)}.",
            "When a worker can run them: celery dislock put-back KEY. See the page Operate it, "
            "Tasks that were set aside.",
            listed(keys),
        )


def reservations(
    seen: Seen, fleet: Fleet, known: Callable[[Sequence[str]], set[str]], *, empty: bool | None
) -> Iterator[Finding]:
    """
    Find reservations that are old, and those whose message is nowhere.

    Args:
        seen: What was seen of the locks.
        fleet: The workers that answered.
        known: Asks the workers which of these task ids they know.
        empty: Whether all queues of the broker are empty; None: not known.
    """
    oldest = sorted(seen.reserved, key=lambda one: -one[1].since)[:ASKED_MOST]
    if not oldest:
        return
    ids = set() if fleet.error else known([reserved.id for _, reserved in oldest])
    gone = [key for key, reserved in oldest if reserved.id not in ids]
    if not gone:
        return
    longest = max(reserved.since for _, reserved in oldest)
    certain = empty is True and not fleet.error and None not in fleet.told.values()
    what = (
        f"{number(len(gone), 'key')} reserved for a message that is in no queue and that no worker "
        f"knows: {some(gone)}."
        if certain
        else f"{number(len(gone), 'key')} reserved for long, up to {longest:.0f} s, for a message "
        f"that no worker has: {some(gone)}."
    )
    yield Finding(
        "reservations",
        WARNING if certain else NOTE,
        what,
        "It was purged, or lost with the broker. No message of this key is sent until the "
        "reservation ends, after lock_unique_for. To end it now: celery dislock free KEY"
        if certain
        else "It may wait in a queue still. If it was purged, end the reservation: celery dislock "
        "free KEY. Otherwise it ends by itself after lock_unique_for.",
        listed(gone),
    )


def limits(seen: Seen, fleet: Fleet) -> Iterator[Finding]:
    """Tell which keys people have paused or limited, and who does not heed that."""
    older = [name for name, told in fleet.told.items() if told is None]
    if seen.limits and older:
        yield Finding(
            "limits",
            WARNING,
            f"{number(len(seen.limits), 'key')} paused or limited by somebody. A worker that is "
            f"older than this command does not heed that: {some(older)}.",
            "Update it.",
            listed(older),
        )
    if disagreed := [lock for lock in seen.limits if lock.limit_differs]:
        keys = some(f"{lock.key} ({differing(lock)})" for lock in disagreed)
        yield Finding(
            "limits",
            WARNING,
            f"Independent lock servers disagree about a pause or a limit: {keys}. When another of "
            "them is away, that decides who gets the lock.",
            f"{REPEAT}: celery dislock resume KEY",
            listed(lock.key for lock in disagreed),
        )
    for what, locks in (
        ("Paused by somebody", [lock for lock in seen.limits if lock.limit == 0]),
        ("Limited by somebody", [lock for lock in seen.limits if lock.limit]),
    ):
        if locks:
            keys = some(_limited(lock) for lock in locks)
            yield Finding(
                "limits",
                NOTE,
                f"{what}: {keys}.",
                "To take it back: celery dislock resume KEY",
                listed(lock.key for lock in locks),
            )


def _limited(lock: LockState) -> str:
    told = [f"to {lock.limit}"] if lock.limit else []
    told += [lock.limit_note] if lock.limit_note else []
    told += [f"for {for_people(lock.limit_age)} so far"]
    told += [f"{lock.waiting} waiting"] if lock.waiting else []
    return f"{lock.key} ({'; '.join(told)})"
