"""``celery dislock ls``, ``show`` and ``line``: who holds what, since when, and who waits."""

from __future__ import annotations

import math
from datetime import datetime
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from celery_dislock.exceptions import StoreError
from celery_dislock.operating.cli.keys import by_key
from celery_dislock.operating.cli.session import (
    FOUND,
    as_data,
    as_json,
    duration,
    session,
    write_json,
    write_json_rows,
    write_table,
)
from celery_dislock.scripts.names import aside_of
from celery_dislock.servers.overview import PLACES, look_at_all
from celery_dislock.servers.view import REPEAT, TROUBLES, differing, shown_key
from celery_dislock.words import for_people, plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from celery_dislock.operating.cli.keys import WhichLock
    from celery_dislock.operating.cli.session import Session
    from celery_dislock.servers.view import Holder, LockState, ReservationState, Waiter

NOTHING = "-"
SHOWN = 60  # characters of a task's arguments

# Columns of `ls`: what each has of a lock, and of one holder of it.
LISTED: Mapping[str, Callable[[LockState, Holder | None], object]] = {
    "KEY": lambda lock, _: lock.key,
    "TROUBLE": lambda lock, _: ", ".join(_since(lock, what) for what in lock.troubles),
    "HELD FOR": lambda _, holder: holder and for_people(holder.held),
    "RENEWED": lambda _, holder: holder and _renewed(holder),
    "LEFT": lambda _, holder: holder and for_people(holder.remaining),
    "WAITING": lambda lock, _: lock.waiting,
    "RESERVED": lambda lock, _: lock.reservation and _reserved(lock.reservation),
    "LIMIT": lambda lock, _: _limit(lock),
    "HOLDER": lambda _, holder: holder and holder.who,
}
LISTED_SPARE, LISTED_CUT = ("LEFT", "RENEWED", "LIMIT", "RESERVED"), ("KEY", "HOLDER")

# Columns of `line`.
IN_LINE: Mapping[str, Callable[[Waiter], object]] = {
    "PLACE": lambda waiter: str(waiter.place),
    "WAITING": lambda waiter: for_people(waiter.waiting),
    "TURNS": lambda waiter: str(waiter.turns) if waiter.parked else None,
    "TICKET": lambda waiter: waiter.ticket,
    "WHO": lambda waiter: waiter.who,
    "QUEUE": lambda waiter: waiter.routing_key,
    "ARGUMENTS": lambda waiter: _cut(waiter.args or ""),
}
IN_LINE_SPARE, IN_LINE_CUT = ("ARGUMENTS", "TURNS"), ("WHO", "QUEUE")


@click.command()
@click.argument("pattern", default="*")
@click.option(
    "--held-for", type=duration, metavar="TIME", help="Only locks held for this time: 90, 10m, 1h."
)
@click.option("--task", metavar="NAME", help='Only locks that such tasks hold, as in "shop.*".')
@click.option("--worker", metavar="NAME", help='Only locks held there, as in "celery@w1".')
@as_json
@click.pass_context
def ls(context: click.Context, /, pattern: str, *, json_: bool, **only: Any) -> None:
    """List the locks, those in trouble first.

    PATTERN chooses keys: "export:*". Also locks that nobody holds: those that somebody waits for,
    and those that are reserved, paused or limited. A lock whose data cannot be read is listed with
    the reason.
    """
    with session(context) as opened:
        listed = sorted(found(opened, pattern, _wanted(**only)), key=_order)
        if json_:
            write_json_rows(map(as_dict, listed))
        elif listed:
            rows = [row for one in listed for row in rows_of(one)]
            write_table([*LISTED], rows, spare=LISTED_SPARE, cut=LISTED_CUT)
        else:
            click.echo("No lock matches.", err=True)


@click.command()
@by_key
@as_json
@click.pass_context
def show(context: click.Context, which: WhichLock, json_: bool) -> None:  # noqa: FBT001 -- click's flag
    """Show who holds the lock of KEY, its line and its limit.

    Exit code 1 if nothing is known of the lock: nobody holds it, nobody waits, and the key is not
    reserved.
    """
    with session(context) as opened:
        locks = look_at_all(opened.overview, which.names(opened))
        if json_:
            _write_json_of_each([as_dict(lock) for lock in locks])
        else:
            for lock in locks:
                _write(lock)
        if not any(lock.exists for lock in locks):
            context.exit(FOUND)


@click.command()
@by_key
@click.option("--first", type=click.IntRange(min=1), default=1, help="Place to begin with.")
@click.option(
    "--most", type=click.IntRange(1, 1000), default=PLACES, help="Number of places to show."
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
            names = ("key", "waiting", "turns", "line")
            _write_json_of_each([{name: as_dict(lock)[name] for name in names} for lock in locks])
        else:
            for lock in locks:
                _write_line(lock, several=len(locks) > 1)
        if not any(lock.waiting or lock.turns for lock in locks):
            context.exit(FOUND)


class Damaged(NamedTuple):
    """A lock that cannot be read, and why."""

    key: str
    name: str
    error: StoreError


def as_dict(lock: LockState | Damaged) -> dict[str, Any]:
    """Return a lock as JSON has it."""
    if isinstance(lock, Damaged):
        return {**lock._asdict(), "error": str(lock.error)}
    return {**as_data(lock), "troubles": lock.troubles}


def _write_json_of_each(locks: list[dict[str, Any]]) -> None:
    write_json(locks[0] if len(locks) == 1 else locks)


def write_holder(holder: Holder) -> None:
    """Write all that is known of a lease, in words."""
    since = _as_date(holder.acquired_at)
    lines = {
        "task": holder.task,
        "id": holder.id,
        "thread": holder.thread,
        "worker": holder.worker,
        "process": f"{holder.pid} on {holder.host or '?'}" if holder.pid else None,
        "held for": f"{for_people(holder.held)}, since {since}",
        "mode": holder.mode if holder.mode != "exclusive" else None,
        "lease": _lease_in_words(holder),
        "token": holder.token,
        "owner": holder.owner,
    }
    click.echo(f"  held by {plain(holder.who)}")
    for name, value in lines.items():
        if value is not None:
            click.echo(f"    {name:<9} {plain(value)}")


def _lease_in_words(holder: Holder) -> str:
    left = for_people(holder.remaining)
    if holder.expiring:
        return f"its owner is done; ends in {left}"
    if holder.turn:
        return f"a turn that is not claimed yet; ends in {left}"
    if holder.renewed is None:
        return f"ends in {left}"
    return f"renewed {_renewed(holder)}, ends in {left} unless renewed again"


def _wanted(
    held_for: float | None, task: str | None, worker: str | None
) -> Callable[[Holder], bool] | None:
    """Return what chooses holders; None: also locks without a holder are wanted."""
    if held_for is None and task is None and worker is None:
        return None
    return lambda holder: (
        holder.held >= (held_for or -math.inf)
        and fnmatchcase(holder.task or "", task or "*")
        and fnmatchcase(holder.worker or "", worker or "*")
    )


def found(
    opened: Session,
    pattern: str = "*",
    wanted: Callable[[Holder], bool] | None = None,
    failed: list[StoreError] | None = None,
) -> Iterator[LockState | Damaged]:
    """Yield the locks that are wanted, with the holders that are wanted."""
    for names in opened.overview.names(pattern, failed):
        for name, lock in zip(names, opened.overview.look(names), strict=True):
            if isinstance(lock, StoreError):
                if wanted is None:
                    yield Damaged(shown_key(name), name, lock)
            elif wanted is None:
                if lock.exists:
                    yield lock
            elif holders := list(filter(wanted, lock.holders)):
                yield lock._replace(holders=holders)


def rank(lock: LockState | Damaged) -> int:
    """Return a number that sorts what is wrong to the top, the worst first."""
    troubles = ["damaged"] if isinstance(lock, Damaged) else lock.troubles
    return TROUBLES.index(troubles[0]) if troubles else len(TROUBLES)


def _order(lock: LockState | Damaged) -> tuple[int, str]:
    return (rank(lock), lock.key)


def rows_of(lock: LockState | Damaged) -> list[list[object]]:
    """Return a row for each holder of a lock."""
    if isinstance(lock, Damaged):
        why = f"cannot be read: {lock.error.reason}"
        cells = {"KEY": lock.key, "TROUBLE": "damaged", "HOLDER": why}
        return [[cells.get(heading, NOTHING) for heading in LISTED]]
    holders: Sequence[Holder | None] = lock.holders or [None]
    return [[cell(lock, one) or NOTHING for cell in LISTED.values()] for one in holders]


def _since(lock: LockState, trouble: str) -> str:
    """Return a trouble, and since when it is there where that is known."""
    if trouble == "paused":
        return f"paused {for_people(lock.limit_age)}"
    if trouble == "overdue":
        return f"overdue {for_people(max(one.renewed or 0.0 for one in lock.holders))}"
    return trouble


def _renewed(holder: Holder) -> str:
    return "" if holder.renewed is None else f"{for_people(holder.renewed)} ago"


def _reserved(reserved: ReservationState) -> str:
    return f"{reserved.state}, {for_people(reserved.since)}"


def _limit(lock: LockState) -> str:
    limit = NOTHING if lock.limit is None else "paused" if lock.limit == 0 else str(lock.limit)
    return f"{limit}, differs" if lock.limit_differs else limit


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _write(lock: LockState) -> None:
    click.echo(f"lock {plain(lock.key)}")
    for holder in lock.holders:
        write_holder(holder)
    if not lock.holders:
        click.echo("  held by nobody")
    _write_limit(lock)
    if lock.reservation is not None:
        write_reservation(lock.reservation)
    _write_waiting(lock)
    if lock.aside:
        kept = plain(aside_of(lock.name))
        click.echo(f"  {lock.aside} set aside, because nobody could read or run them: {kept}")
        click.echo(f"    ... celery dislock put-back {plain(lock.key)}")


def _write_limit(lock: LockState) -> None:
    if lock.limit_differs:
        click.echo(f"  {differing(lock)}. {REPEAT}: celery dislock resume {plain(lock.key)}")
    if lock.limit is None:
        return
    does = "paused" if lock.limit == 0 else f"limited to {lock.limit} at a time"
    lasts = "until it is resumed"
    if lock.limit_remaining is not None:
        lasts = f"for {for_people(lock.limit_remaining)} more"
    note = f", {lock.limit_note}" if lock.limit_note else ""
    since = "" if lock.limit_since is None else f", since {_as_date(lock.limit_since)}"
    click.echo(f"  {does} {lasts}{plain(note)}{since}")


def _as_date(unix_time: float) -> str:
    try:
        return datetime.fromtimestamp(unix_time).astimezone().isoformat(" ", "seconds")
    except (ValueError, OverflowError, OSError):  # of a damaged record
        return "?"


def write_reservation(reserved: ReservationState) -> None:
    """Write all that is known of a reservation, in words."""
    since, left = for_people(reserved.since), for_people(reserved.remaining)
    task = f"for task {plain(reserved.id)}, which"
    if reserved.state == "ended":
        click.echo(f"  stays reserved {task} ended {since} ago; ends in {left}")
    else:
        state = reserved.state
        click.echo(f"  reserved {since} ago {task} is {state}; ends in {left} unless renewed")


def _write_waiting(lock: LockState) -> None:
    for place in lock.turns:
        given = f"turn {place.turns}, its message is on its way"
        click.echo(f"  has its turn: {plain(place.who)} ({given})")
    if lock.waiting:
        click.echo(f"  {lock.waiting} in line")
    for place in lock.line:
        parked = f", parked as {place.ticket}" if place.parked else ""
        waiting = for_people(place.waiting)
        click.echo(f"    {place.place}. {plain(place.who)}, for {waiting}{plain(parked)}")
    if lock.waiting > len(lock.line):
        click.echo(f"    ... celery dislock line {plain(lock.key)} --first {len(lock.line) + 1}")


def _write_line(lock: LockState, *, several: bool) -> None:
    if several:
        click.echo(f"lock {plain(lock.key)}")
    if not (lock.waiting or lock.turns):
        click.echo(f"Nobody waits for lock {plain(lock.key)}.", err=True)
        return
    rows = [
        [cell(waiter) or NOTHING for cell in IN_LINE.values()]
        for waiter in (*lock.turns, *lock.line)
    ]
    write_table([*IN_LINE], rows, spare=IN_LINE_SPARE, cut=IN_LINE_CUT)
    last = lock.line[-1].place if lock.line else 0
    if last < lock.waiting:
        click.echo(f"{lock.waiting} in line; go on with --first {last + 1}", err=True)
