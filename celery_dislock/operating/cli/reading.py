"""``celery dislock ls``, ``show`` and ``line``: who holds what, since when, and who waits."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import click

from celery_dislock.operating.checks.troubles import judged, troubles_of
from celery_dislock.operating.cli.session import (
    FOUND,
    as_json,
    by_key,
    duration,
    session,
    write_json,
    write_remark,
    write_table,
)
from celery_dislock.operating.cli.table import wrapped
from celery_dislock.operating.locks import as_data, rows
from celery_dislock.servers.overview import PLACES_SHOWN, look_at_all
from celery_dislock.servers.view import is_beat
from celery_dislock.words import for_people, plain, time_of_day, to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from celery_dislock.operating.cli.session import WhichLock
    from celery_dislock.operating.locks import ListedLock
    from celery_dislock.servers.overrides import RateState
    from celery_dislock.servers.view import Holder, LockState, ReservationState
    from celery_dislock.servers.waiters import Waiter

ARGUMENTS_MOST = 60  # characters of a task's arguments


def _held_by(row: ListedLock) -> str | None:
    """Say who holds a lock, or why it is listed if nobody does."""
    if row.problem:
        return f"cannot be read: {row.problem.reason}"
    if row.holders:
        many, units = len(row.holders), row.state.units if row.state else 0
        counted = [f"{many} leases"] * (many > 1) + [f"cost {units:,}"] * (units > many)
        several = f"{', '.join(counted)}: " if counted else ""
        longest = max(row.holders, key=lambda holder: holder.held)
        kept = f"kept, waits for {longest.waits!r}: {longest.id}"
        return several + (kept if longest.is_kept else longest.who)
    told, reserved = [], row.state and row.state.reservation
    if reserved:
        told.append(f"reserved for {reserved.id}, {reserved.state}")
    rate = row.state and row.state.rate
    if rate and rate.early:
        told.append(_next_start(rate) if rate.held_back else f"{_next_start(rate)} ({rate.rate})")
    return "; ".join(["nobody", *told]) if told else None


def _limits(row: ListedLock) -> str | None:
    """Say what people have set."""
    told: list[object] = []
    if row.state and row.state.limit is not None:
        told.append(row.state.limit)
    if row.state and (rate := row.state.rate):
        told += [rate.rate] if rate.is_set else []
        told += ["held back"] if rate.held_back else []
    return "; ".join(map(str, told)) or None


# Columns of `ls`.
LS_COLUMNS: Mapping[str, Callable[[ListedLock], object]] = {
    "KEY": lambda row: row.key,
    "TROUBLE": lambda row: ", ".join(
        what if since is None else f"{what} {for_people(since)}"
        for what, since in row.troubles.items()
    ),
    "HELD FOR": lambda row: row.holders and for_people(row.longest),
    "WAITING": lambda row: row.waiting,
    "LIMIT": _limits,
    "HOLDER": _held_by,
}

# Columns of `line`.
LINE_COLUMNS: Mapping[str, Callable[[Waiter], object]] = {
    "PLACE": lambda waiter: str(waiter.place),
    "WAITING": lambda waiter: None if is_beat(waiter) else for_people(waiter.waiting),
    "TURNS": lambda waiter: str(waiter.turns) if waiter.parked else None,
    "TICKET": lambda waiter: waiter.ticket,
    "WHO": lambda waiter: waiter.who,
    "COST": lambda waiter: f"{waiter.cost:,}",
    "QUEUE": lambda waiter: waiter.routing_key,
    "ARGUMENTS": lambda waiter: (waiter.args or "")[:ARGUMENTS_MOST],
}

# If a task of the line passes several locks: its keys tell of its arguments, its ticket has its id.
STATION_COLUMNS: Mapping[str, Callable[[Waiter], object]] = {
    **{name: cell for name, cell in LINE_COLUMNS.items() if name != "ARGUMENTS"},
    "WHO": lambda waiter: (waiter.parked and waiter.task) or waiter.who,
    "LOCKS": lambda waiter: _station(waiter, "/"),
}


@click.command()
@click.argument("pattern", default="*")
@click.option(
    "--held-for", type=duration, metavar="TIME", help="Only locks held for this time: 90, 10m, 1h."
)
@click.option("--task", metavar="NAME", help='Only locks held by this task, or by such: "shop.*".')
@click.option(
    "--worker", metavar="NAME", help='Only locks held on this worker, or on such: "*@web-*".'
)
@as_json
@click.pass_context
def ls(context: click.Context, /, pattern: str, *, json_: bool, **only: Any) -> None:
    """List the locks, those in trouble first.

    PATTERN chooses keys: "export:*". Also locks that nobody holds: those that somebody waits for,
    those that are reserved, paused, limited or held back, and those that cannot be taken yet,
    because of their rate. A lock whose data cannot be read is listed with the reason.
    """
    with session(context) as opened:
        listed = list(judged(rows(opened.overview, pattern), opened.site))
        if any(option is not None for option in only.values()):
            listed = list(_chosen(listed, **only))
        listed.sort(key=lambda row: (row.rank, row.key))
        if json_:
            lines = ",\n ".join(to_json(as_dict(row), default=str) for row in listed)
            click.echo(f"[{lines}]")
        elif listed:
            write_table(LS_COLUMNS, listed)
        else:
            write_remark("No lock matches.")


@click.command()
@by_key
@as_json
@click.pass_context
def show(context: click.Context, which: WhichLock, json_: bool) -> None:  # noqa: FBT001 -- click's flag
    """Show who holds the lock of KEY, its line, its limit and its rate.

    Exit code 1 if nothing is known of the lock: nobody holds it, nobody waits, and the key is not
    reserved.
    """
    with session(context) as opened:
        site = opened.site
        locks = look_at_all(site.overview.server, which.names(opened))
        troubles = [troubles_of(lock, site) for lock in locks]
        if json_:
            names = ([trouble.name for trouble in found] for found in troubles)
            _write_json_of_each(list(map(_as_dict, locks, names)))
        else:
            for lock, found in zip(locks, troubles, strict=True):
                write_lines(lock_lines(lock))
                write_lines(f"  {trouble.name}: {trouble.told(lock)}" for trouble in found)
        if not any(lock.exists for lock in locks):
            context.exit(FOUND)


@click.command()
@by_key
@click.option("--first", type=click.IntRange(min=1), default=1, help="Place to begin with.")
@click.option(
    "--most", type=click.IntRange(1, 1000), default=PLACES_SHOWN, help="Number of places to show."
)
@as_json
@click.pass_context
def line(
    context: click.Context,
    which: WhichLock,
    first: int,
    most: int,
    json_: bool,  # noqa: FBT001 -- click's flag
) -> None:
    """Show who waits for the lock of KEY, in order.

    Place 0 has its turn: its message is on its way. Exit code 1 if nobody waits.
    """
    with session(context) as opened:
        locks = [opened.overview.lock(name, first - 1, most) for name in which.names(opened)]
        if json_:
            names = ("key", "waiting", "turns", "line", "rate")
            known = map(as_data, locks)
            _write_json_of_each([{name: lock[name] for name in names} for lock in known])
        else:
            for lock in locks:
                _write_line(lock, several=len(locks) > 1)
        if not any(lock.waiting or lock.turns for lock in locks):
            context.exit(FOUND)


def as_dict(row: ListedLock) -> dict[str, Any]:
    """Return a lock of a list as JSON has it."""
    if row.state is None:
        return {"key": row.key, "name": row.name, "error": str(row.problem)}
    return _as_dict(row.state, list(row.troubles))


def _as_dict(lock: LockState, troubles: list[str]) -> dict[str, Any]:
    return {**as_data(lock), "troubles": troubles}


def _write_json_of_each(locks: list[dict[str, Any]]) -> None:
    write_json(locks[0] if len(locks) == 1 else locks)


def _chosen(
    listed: Iterable[ListedLock], *, held_for: float | None, task: str | None, worker: str | None
) -> Iterator[ListedLock]:
    """Yield the locks with such holders, and with these holders only."""
    for row in listed:
        holders = [
            holder
            for holder in row.holders
            if (held_for is None or holder.held >= held_for)
            and fnmatchcase(holder.task or "", task or "*")
            and fnmatchcase(holder.worker or "", worker or "*")
        ]
        if row.state and holders:
            yield row._replace(found=row.state._replace(holders=holders))


def _station(waiter: Waiter, of: str) -> str | None:
    """Say how far a parked task has come along its locks; None: it has one."""
    keeps = f"keeps {', '.join(waiter.keeps)}" if waiter.keeps else ""
    if not (waiter.stations and waiter.place):
        return keeps or None
    nth = f"{len(waiter.keeps) + 1}{of}{len(waiter.stations)}"
    return f"{nth}, {keeps}" if keeps else nth


def write_lines(lines: Iterable[str]) -> None:
    """Write lines that fit; what goes on stands below, further in."""
    for line in lines:
        indent = line[: len(line) - len(line.lstrip())]
        click.echo(wrapped(line.lstrip(), indent, f"{indent}    "))


def holder_lines(holder: Holder) -> Iterator[str]:
    """Yield all that is known of a lease, in words."""
    since = time_of_day(holder.acquired_at)
    leads = is_beat(holder)
    how = "led" if leads else "kept" if holder.is_kept else "held"
    host = holder.worker if holder.thread else holder.host
    known = {
        "task": holder.task,
        "id": holder.id,
        "thread": None if leads else holder.thread,
        "worker": None if holder.thread else holder.worker,
        "process": f"{holder.pid} on {host or '?'}" if holder.pid else None,
        f"{'leads' if leads else how} for": f"{for_people(holder.held)}, since {since}",
        "mode": holder.mode if holder.mode != "exclusive" else None,
        "cost": _cost_in_words(holder),
        "lease": _lease_in_words(holder),
        "newer": holder.superseded and f"task {holder.superseded}, which waits for this one to end",
        "token": holder.token,
        "owner": holder.owner,
    }
    yield f"  {how} {'for' if holder.is_kept else 'by'} {holder.who}"
    yield from (f"    {name:<9} {value}" for name, value in known.items() if value is not None)


def _cost_in_words(holder: Holder) -> str | None:
    if holder.spent is not None:
        return f"{holder.cost:,}, spent {holder.spent:,}"
    return f"{holder.cost:,}" if holder.cost > 1 else None


def _lease_in_words(holder: Holder) -> str:
    left = f"ends in {for_people(holder.remaining)}"
    if holder.expiring:
        return f"its owner is done; {left}"
    if holder.is_kept:
        return f"{left} unless a worker's sweep renews it"
    if holder.turn:
        return f"a turn that is not claimed yet; {left}"
    if holder.renewed is None:
        return left
    return f"renewed {for_people(holder.renewed)} ago, {left} unless renewed again"


def lock_lines(lock: LockState) -> Iterator[str]:
    """Yield all that is known of a lock, in words."""
    yield f"lock {lock.key}"
    for holder in lock.holders:
        yield from holder_lines(holder)
    if not lock.holders:
        yield f"  {'held' if lock.ticked is None else 'led'} by nobody"
    if lock.ticked is not None:
        yield f"  last tick {for_people(lock.ticked)} ago"
    if lock.limit is not None:
        yield _limit_line(lock)
    if lock.rate is not None:
        yield from _rate_lines(lock.rate)
    if lock.reservation is not None:
        yield reservation_line(lock.reservation)
    yield from _line_lines(lock)
    if lock.aside:
        yield f"  {lock.aside} set aside, because nobody could read or run them"
        yield f"    ... celery dislock put-back {lock.argument}"


def _limit_line(lock: LockState) -> str:
    does = "paused" if lock.limit == 0 else f"limited to {lock.limit} at a time"
    return f"  {does} {_lasting(lock.limit_remaining, lock.limit_note, lock.limit_since)}"


def _rate_lines(rate: RateState) -> Iterator[str]:
    """Yield how often a lock is taken, and what people have set, with why and since when."""
    if rate.rate is not None:
        lasts = ""
        if rate.is_set:
            lasts = f" {_lasting(rate.remaining, rate.note, rate.since)}"
        soon = f"; {_next_start(rate)}" if rate.early and not rate.held_back else ""
        yield f"  rate: {rate.rate}{lasts}{soon}"
    if rate.held_back:
        since = None if rate.is_set else rate.since
        yield f"  held back {_lasting(rate.held_back, rate.back_note, since)}"


def _next_start(rate: RateState) -> str:
    if rate.held_back:
        return f"held back for {for_people(rate.held_back)} more"
    return f"the next may start in {for_people(rate.early)}"


def _lasting(remaining: float | None, note: str, since: float | None) -> str:
    """Say for how long something holds that people have set, why, and since when."""
    lasts = "until it is resumed" if remaining is None else f"for {for_people(remaining)} more"
    dated = "" if since is None else f"since {time_of_day(since)}"
    return ", ".join(filter(None, (lasts, note, dated)))


def _line_lines(lock: LockState) -> Iterator[str]:
    for place in lock.turns:
        keeps = f", keeps {', '.join(place.keeps)}" if place.keeps else ""
        told = f"turn {place.turns}, its message is on its way{keeps}"
        yield f"  has its turn: {place.who} ({told})"
    if lock.waiting:
        if lock.words:
            yield f"  {lock.words}"
        yield f"  {lock.waiting} in line{lock.lack and f'; {lock.lack}'}"
    for place in lock.line:
        parked = f", parked as {place.ticket}" if place.parked else ""
        waits = " stands by" if is_beat(place) else f", for {for_people(place.waiting)}"
        cost = f", cost {place.cost:,}" if place.cost > 1 else ""
        yield f"    {place.place}. {place.who}{waits}{cost}{parked}"
        if station := _station(place, " of "):
            yield f"       waits for lock {station}"
    if lock.waiting > len(lock.line):
        yield f"    ... celery dislock line {lock.argument} --first {len(lock.line) + 1}"


def reservation_line(reserved: ReservationState) -> str:
    """Return all that is known of a reservation, in words."""
    since, left = for_people(reserved.since), f"ends in {for_people(reserved.remaining)}"
    if reserved.state == "ended":
        return f"  stays reserved for task {reserved.id}, which ended {since} ago; {left}"
    which = f"which is {reserved.state}"
    return f"  reserved {since} ago for task {reserved.id}, {which}; {left} unless renewed"


def _write_line(lock: LockState, *, several: bool) -> None:
    if several:
        click.echo(f"lock {plain(lock.key)}")
    if not (lock.waiting or lock.turns):
        write_remark(f"Nobody waits for lock {lock.key}.")
        return
    places = (*lock.turns, *lock.line)
    passes_several = any(place.stations for place in places)
    columns = dict(STATION_COLUMNS if passes_several else LINE_COLUMNS)
    if all(place.cost == 1 for place in places):
        del columns["COST"]
    write_table(columns, places)
    for told in [] if lock.rate is None else _rate_lines(lock.rate):
        write_remark(told.strip())
    for told in filter(None, (lock.words, lock.lack)):
        write_remark(told)
    last = lock.line[-1].place if lock.line else 0
    if last < lock.waiting:
        write_remark(f"{lock.waiting} in line; go on with --first {last + 1}")
