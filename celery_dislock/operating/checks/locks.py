"""Examine the locks: leases of the dead, lines that nobody serves, what was set aside."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from celery_dislock.exceptions import DamagedLockError
from celery_dislock.operating.checks.table import Table
from celery_dislock.operating.findings import NAMED, note, number, ok, serious, some, warning
from celery_dislock.parking.identity import StoreIdentity
from celery_dislock.parking.store import Lines
from celery_dislock.scripts import LINES
from celery_dislock.scripts.names import index_of_lines, store_of, sweep_lock
from celery_dislock.servers.server import scan
from celery_dislock.servers.view import REPEAT, differing
from celery_dislock.words import for_people

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from celery_dislock.operating.checks.facts import Facts, Fleet
    from celery_dislock.operating.findings import Finding
    from celery_dislock.servers.server import Server
    from celery_dislock.servers.view import Holder, LockState, Waiter

ASKED_MOST = 200  # reservations whose ids the workers are asked for
HELD_LONG = 20  # timeouts, while others wait: ten minutes, unless a task has another timeout
STUCK_LONG = 5.0  # seconds since the first in line has come
TURNS_MANY = 3  # turns that a parked task has not claimed
LATELY = 600.0  # seconds: a task that has its turn elsewhere comes more often
ELSEWHERE_MOST = 200  # locks of each other prefix that are looked at

TABLE = Table()


@TABLE.check("locks")
def counted(facts: Facts) -> Iterator[Finding]:
    """Tell how much was looked at, and what could not be."""
    seen = facts.locks
    for error in seen.away:
        yield note(f"The locks of one server could not be looked at: {error}")
    damaged = [one for one in seen.unread if isinstance(one, DamagedLockError)]
    if damaged:
        names = [one.lock for one in damaged]
        yield serious(
            f"{number(len(damaged), 'lock')} cannot be used, and their tasks fail: "
            f"{some(map(repr, names))}. {damaged[0].reason}.",
            "See the page Operate it, A damaged lock.",
            names,
        )
    if unread := [one for one in seen.unread if one not in damaged]:
        yield note(f"{number(len(unread), 'lock')} could not be looked at: {unread[-1]}")
    held = f"{number(seen.locks, 'lock')}, {number(seen.leases, 'lease')}"
    yield ok(f"{held}, {seen.waiting} waiting.")


@TABLE.check("leases")
def of_mute_workers(facts: Facts) -> Iterator[Finding]:
    """Find leases whose worker does not answer."""
    mute = [] if facts.fleet.error else _mute(facts)
    if stale := [(key, holder) for key, holder in mute if not holder.is_renewed]:
        keys = [key for key, _ in stale]
        longest = max(holder.remaining for _, holder in stale)
        yield warning(
            f"{number(len(stale), 'lease')} of workers that do not answer "
            f"({some(str(holder.worker) for _, holder in stale)}): {some(keys)}.",
            f"If these workers are gone, the leases end by themselves, the last in {longest:.0f} s."
            " To end one now: celery dislock free KEY. A lease with a fixed expiry, and one that "
            "a task left to expire, lasts on purpose.",
            keys,
        )
    if renewed := [(key, holder) for key, holder in mute if holder.is_renewed]:
        keys = [key for key, _ in renewed]
        yield note(
            f"{number(len(renewed), 'lease')} of workers that do not answer "
            f"({some(str(holder.worker) for _, holder in renewed)}), renewed in time nevertheless: "
            f"{some(keys)}.",
            "These workers may be alive: another broker, the pool solo, or a warm shutdown. Look "
            "again with --timeout 5, or after the timeout of the lock.",
            keys,
        )


@TABLE.check("leases")
def held_long(facts: Facts) -> Iterator[Finding]:
    """Find leases that others have waited for, for long: of a body that hangs, perhaps."""
    found = [
        (lock, holder)
        for lock in facts.locks.lines
        for holder in lock.holders
        if holder.timeout and holder.held > HELD_LONG * holder.timeout
    ]
    if found:
        longest = sorted(found, key=lambda one: -one[1].held)[:NAMED]
        described = "; ".join(
            f"{lock.key}, held for {for_people(holder.held)} by {holder.who}, with {lock.waiting} "
            "waiting"
            for lock, holder in longest
        )
        yield warning(
            f"{number(len(found), 'lease')} held unusually long while others wait: "
            f"{described}{'; and others' if len(found) > NAMED else ''}.",
            "If its body hangs: celery dislock free --terminate KEY. A task that takes that long "
            "on purpose is best given a time limit, and max_renew_times.",
            [lock.key for lock, _ in found],
        )


@TABLE.check("lines")
def unserved(facts: Facts) -> Iterator[Finding]:
    """Find parked tasks whose messages no worker would consume."""
    found = [
        (lock.key, one)
        for lock, one in _parked(facts)
        if one.routing_key is not None and not _is_consumed(one, facts.fleet)
    ]
    if found and not facts.fleet.error:
        keys = [key for key, _ in found]
        # A worker that does not answer, and renews, may consume them.
        mute = any(holder.is_renewed for _, holder in _mute(facts))
        yield (warning if mute else serious)(
            f"{number(len(keys), 'parked task')} will go to queues that no worker that answers "
            f"consumes ({some(one.routing_key or '?' for _, one in found)}), in the lines of "
            f"{some(keys)}.",
            "Start a worker for these queues (-Q). To end a parked task: celery dislock drop "
            f"TICKET. Tickets: {some(one.ticket for _, one in found)}.",
            keys,
        )


@TABLE.check("lines")
def unclaimed(facts: Facts) -> Iterator[Finding]:
    """Find parked tasks that do not claim their turns."""
    found = [(lock.key, one.ticket) for lock, one in _parked(facts) if one.turns >= TURNS_MANY]
    if found:
        keys = [key for key, _ in found]
        yield warning(
            f"{number(len(keys), 'parked task')} had {TURNS_MANY} or more turns, and did not "
            f"claim them: {some(keys)}.",
            "Their messages do not reach a worker, or it cannot run them: look at its log. To end "
            f"one: celery dislock drop TICKET. Tickets: {some(ticket for _, ticket in found)}.",
            keys,
        )


@TABLE.check("lines")
def stuck(facts: Facts) -> Iterator[Finding]:
    """Find lines of a lock that nobody holds: each release hands the lock on."""
    found = [
        lock
        for lock in facts.locks.lines
        if lock.is_stuck and lock.line and lock.line[0].waiting > STUCK_LONG
    ]
    if found:
        described = "; ".join(
            f"{lock.key}, {lock.waiting} waiting, the first for {for_people(lock.line[0].waiting)}"
            for lock in found[:NAMED]
        )
        yield warning(
            f"{number(len(found), 'line')} of locks that nobody holds: {described}.",
            "A worker with --dislock goes on with the line at its next sweep, within a third of "
            "the timeout: look again then. To let it go on now: celery dislock resume KEY",
            [lock.key for lock in found],
        )


@TABLE.check("sweep")
def unswept(facts: Facts) -> Iterator[Finding]:
    """Find lines that no worker sweeps.  A few round trips."""
    if not any(one.parked for lock in facts.locks.lines for one in lock.line):
        return
    beginning = index_of_lines(facts.prefix, "")
    homes = {name.removeprefix(beginning) for name in _names(facts.server, f"{beginning}*")}
    homes.discard(store_of("").removeprefix(index_of_lines("", "")))
    left = []
    for home in sorted(homes):
        total, *_ = facts.server.run(LINES, [index_of_lines(facts.prefix, home)], b"0", 1)
        if total and not facts.overview.lock(sweep_lock(facts.prefix, home)).holders:
            left.append("this app's broker" if home == facts.home else f"the broker {home}")
    if left:
        yield warning(
            f"Nobody sweeps the lines of {', '.join(left)}: a line stands still if the holder "
            "of its lock dies.",
            "Start a worker with --dislock on that broker. After a worker has ended, the next one "
            "takes over within a third of the timeout: then look again.",
            left,
        )


@TABLE.check("lines")
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


@TABLE.check("lines")
def other_prefixes(facts: Facts) -> Iterator[Finding]:
    """Find lines under other prefixes that no worker sweeps.  Reads the names of all keys."""
    if not facts.server.keeps_lines:
        return
    ending = index_of_lines("", facts.home)
    prefixes = {name.removesuffix(ending) for name in _names(facts.server, f"*{ending}")}
    left: dict[str, int] = {}
    for prefix in sorted(prefixes - {facts.prefix}):
        if facts.overview.lock(sweep_lock(prefix, facts.home), most=0).holders:
            continue  # another app's, perhaps
        lines = Lines(facts.server, prefix, facts.home, lambda _turns: None)
        found = [
            facts.overview.lock(name, most=1) for name in islice(lines.names(), ELSEWHERE_MOST)
        ]
        if parked := sum(lock.waiting + len(lock.turns) for lock in found):
            left[prefix] = parked
    if left:
        yield warning(
            f"{number(sum(left.values()), 'task')} parked under another prefix ({some(left)}), "
            "where no worker sweeps.",
            f"If no worker uses that any more: celery dislock drain --from-prefix {min(left)}",
            left,
        )


@TABLE.check("set aside")
def aside(facts: Facts) -> Iterator[Finding]:
    """Find parked tasks that were set aside."""
    found = {lock.key: lock.aside for lock in facts.locks.suspects if lock.aside}
    if found:
        tasks = sum(found.values())
        yield warning(
            f"{number(tasks, 'parked task')} could not be read or run, and "
            f"{'was' if tasks == 1 else 'were'} set aside: {some(found)}.",
            "When a worker can run them: celery dislock put-back KEY. See the page Operate it, "
            "Tasks that were set aside.",
            found,
        )


@TABLE.check("reservations")
def reservations(facts: Facts) -> Iterator[Finding]:
    """Find reservations that are old, and those whose message is nowhere."""
    fleet = facts.fleet
    old = {
        lock.key: lock.reservation
        for lock in facts.locks.suspects
        if lock.reservation and facts.is_old(lock.reservation)
    }
    oldest = sorted(old, key=lambda key: -old[key].since)[:ASKED_MOST]
    asks = oldest and not fleet.error
    known = facts.workers.known([old[key].id for key in oldest]) if asks else ()
    gone = [key for key in oldest if old[key].id not in known]
    if not gone:
        return
    what = f"{number(len(gone), 'key')} reserved"
    if not fleet.error and None not in fleet.answers.values() and facts.workers.empty():
        yield warning(
            f"{what} for a message that is in no queue and that no worker knows: {some(gone)}.",
            "It was purged, or lost with the broker. No message of this key is sent until the "
            "reservation ends, after lock_unique_for. To end it now: celery dislock free KEY",
            gone,
        )
    else:
        yield note(
            f"{what} for long, up to {old[oldest[0]].since:.0f} s, for a message that no worker "
            f"has: {some(gone)}.",
            "It may wait in a queue still. If it was purged, end the reservation: celery dislock "
            "free KEY. Otherwise it ends by itself after lock_unique_for.",
            gone,
        )


@TABLE.check("limits")
def limits(facts: Facts) -> Iterator[Finding]:
    """Tell which keys people have paused or limited."""
    limited = [
        lock for lock in facts.locks.suspects if lock.limit is not None or lock.limit_differs
    ]
    if disagreed := [lock for lock in limited if lock.limit_differs]:
        keys = some(f"{lock.key} ({differing(lock)})" for lock in disagreed)
        yield warning(
            f"Independent lock servers disagree about a pause or a limit: {keys}. When another of "
            "them is away, that decides who gets the lock.",
            f"{REPEAT}: celery dislock resume KEY",
            [lock.key for lock in disagreed],
        )
    if here := [lock for lock in limited if lock.limit is not None]:
        what = f"Paused or limited by somebody: {some(map(_limited, here))}."
        yield note(what, "To take it back: celery dislock resume KEY", [one.key for one in here])


def _limited(lock: LockState) -> str:
    known = (
        f"to {lock.limit} at a time" if lock.limit else "paused",
        lock.limit_note,
        f"for {for_people(lock.limit_age)} so far",
        f"{lock.waiting} waiting" if lock.waiting else "",
    )
    return f"{lock.key} ({'; '.join(filter(None, known))})"


def _mute(facts: Facts) -> list[tuple[str, Holder]]:
    """Return the leases of workers that do not answer, with their keys."""
    return [
        (lock.key, holder)
        for lock in facts.locks.suspects
        for holder in lock.holders
        if facts.is_mute(holder)
    ]


def _parked(facts: Facts) -> list[tuple[LockState, Waiter]]:
    """Return the parked tasks of the longest lines, with their locks."""
    return [
        (lock, one) for lock in facts.locks.lines for one in (*lock.line, *lock.turns) if one.parked
    ]


def _is_consumed(parked: Waiter, fleet: Fleet) -> bool:
    """Tell whether a message that goes where this task's went reaches a worker."""
    for queue in (queue for queues in fleet.queues.values() for queue in queues):
        exchange = queue.get("exchange") or {}
        if parked.exchange in {"", None}:
            if parked.routing_key == queue.get("name"):
                return True
        elif parked.exchange == exchange.get("name") and (
            exchange.get("type") != "direct"  # patterns are the broker's business
            or parked.routing_key in _keys_of(queue)
        ):
            return True
    return False


def _keys_of(queue: Mapping[str, Any]) -> list[Any]:
    bindings = queue.get("bindings") or []
    return [queue.get("routing_key"), *(one.get("routing_key") for one in bindings)]


def _names(server: Server, pattern: str) -> Iterator[str]:
    for send in server.senders():
        for names in scan(send, pattern):
            yield from names
