"""``celery dislock free``, ``drop`` and ``put-back``: leases, reservations, parked tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from celery_dislock.exceptions import DamagedLockError
from celery_dislock.keys.values import check_key
from celery_dislock.locks.lease import RENEWALS_PER_TIMEOUT
from celery_dislock.operating.cli.keys import by_key
from celery_dislock.operating.cli.reading import write_holder, write_reservation
from celery_dislock.operating.cli.session import (
    FOUND,
    as_json,
    audit,
    duration,
    session,
    write_json,
)
from celery_dislock.servers.overview import find_parked, look_at_all
from celery_dislock.tasks.handle import WAIT
from celery_dislock.words import for_people, plain

if TYPE_CHECKING:
    from collections.abc import Iterator

    from celery_dislock.operating.cli.keys import Asked
    from celery_dislock.operating.cli.session import Session
    from celery_dislock.servers.view import Holder, LockState, ReservationState, Waiter

yes = click.option("--yes", "-y", is_flag=True, help="Do not ask, for scripts.")

FREED, TERMINATED, ENDED, RUNS, LEFT = (
    "freed",
    "terminated",
    "ended meanwhile",
    "still runs",
    "left",
)


@click.command()
@by_key
@click.option(
    "--terminate",
    is_flag=True,
    help="Tell the workers to end the task first, and wait until it has released the lock.",
)
@click.option("--signal", default="TERM", show_default=True, help="With --terminate: what it gets.")
@click.option(
    "--wait",
    type=duration,
    default=f"{WAIT:g}",
    metavar="TIME",
    show_default=True,
    help="With --terminate: how long to wait for it.",
)
@click.option("--token", type=int, help="Only the lease with this fencing token.")
@yes
@as_json
@click.pass_context
def free(
    context: click.Context,
    /,
    asked: Asked,
    *,
    token: int | None,
    yes: bool,
    json_: bool,
    **how: Any,
) -> None:
    """Free the lock of KEY, and hand it to the next in line.

    Shows each holder and asks. Ends the lease that was shown, and never one that has come since.
    The same goes for the reservation of KEY: the next message of the key is sent then.

    Without --terminate the holder goes on until its next renewal tells it that it has lost the
    lock, so two may run at a time.

    Exit code 1 if nothing was freed: nobody held the lock and it was not reserved, both have ended
    meanwhile, or the task still runs.
    """
    with session(context) as opened:
        locks = look_at_all(opened.overview, asked.names(opened))
        found = [
            (lock, holder)
            for lock in locks
            for holder in lock.holders
            if token in {None, holder.token}
        ]
        reserved = [
            (lock, lock.reservation) for lock in locks if lock.reservation and token is None
        ]
        told: list[dict[str, Any]] = []
        for lock, holder in found:
            click.echo(f"lock {plain(lock.key)}", err=True)
            if not json_:
                write_holder(holder)
            outcome = _free(opened, lock, holder, sure=yes, **how)
            told.append(
                {"key": lock.key, "owner": holder.owner, "token": holder.token, "outcome": outcome}
            )
        if any(one["outcome"] == RUNS for one in told):
            reserved = []
        for lock, reservation in reserved:
            click.echo(f"lock {plain(lock.key)}", err=True)
            if not json_:
                write_reservation(reservation)
            outcome = _end(opened, lock, reservation, sure=yes)
            told.append({"key": lock.key, "reserved_for": reservation.id, "outcome": outcome})
        if json_:
            write_json(told)
        if not told:
            with_token = "" if token is None else f" with token {token}"
            keys = " + ".join(asked.keys(opened))
            click.echo(f"Nobody holds lock {plain(keys)}{with_token}.", err=True)
        if not any(one["outcome"] in {FREED, TERMINATED} for one in told):
            context.exit(FOUND)


def _free(
    opened: Session,
    lock: LockState,
    holder: Holder,
    *,
    sure: bool,
    terminate: bool,
    signal: str,
    wait: float,
) -> str:
    """End one lease; return what became of it, for JSON."""
    ends = terminate and holder.can_be_terminated
    if terminate and not ends:
        why = "is no task that a worker runs" if holder.thread else "runs no body now"
        click.echo(f"It cannot be terminated: {plain(holder.who)} {why}.", err=True)
        if not (holder.turn or holder.expiring):
            return RUNS
    question = f"Terminate {holder.who} and free the lock?" if ends else _risk(holder)
    if not agrees(question, sure=sure):
        return LEFT
    if ends:
        opened.actions.terminate(holder, signal=signal)
        audit(f"told the workers to end {_of(holder)}, which holds lock {lock.key!r}")
        click.echo(f"Told the workers to end it; waiting for {for_people(wait)} at most.", err=True)
        left = opened.actions.wait_until_ended(lock.name, holder, wait)
        if left is None:
            click.echo(f"It has ended. Lock {plain(lock.key)} is free, or handed on.", err=True)
            return TERMINATED
        if left.may_live:
            click.echo(
                f"It still holds the lock after {for_people(wait)}: nothing was freed. Its pool "
                "may not be able to end a task (prefork is), its worker may not answer, or the "
                "task may ignore the signal: try --signal KILL. To free the lock all the same, "
                "leave out --terminate; two may run then.",
                err=True,
            )
            return RUNS
        click.echo("Its lease is not renewed any more: its process is gone.", err=True)
    if opened.actions.free(lock.name, holder.owner, holder.token):
        audit(f"freed lock {lock.key!r} of {_of(holder)}")
        click.echo(f"Freed lock {plain(lock.key)}.{_afterwards(holder, ends=ends)}", err=True)
        return FREED
    click.echo(f"That lease has ended meanwhile. Lock {plain(lock.key)} is as it was.", err=True)
    return ENDED


def _end(opened: Session, lock: LockState, reservation: ReservationState, *, sure: bool) -> str:
    """End a reservation; return what became of it, for JSON."""
    goes_on = {
        "running": "Its task goes on.",
        "ended": "Its task has ended.",
    }.get(reservation.state, "Its message may still wait, and runs then as well.")
    if not agrees(f"End the reservation, so that the next message is sent? {goes_on}", sure=sure):
        return LEFT
    if opened.actions.end_reservation(lock.name, reservation):
        audit(f"ended the reservation of lock {lock.key!r} for task {reservation.id!r}")
        click.echo(f"Ended the reservation of {plain(lock.key)}.", err=True)
        return FREED
    click.echo(f"That reservation of {plain(lock.key)} has ended meanwhile.", err=True)
    return ENDED


def _of(holder: Holder) -> str:
    return f"{holder.who!r} (owner {holder.owner!r}, token {holder.token})"


def _risk(holder: Holder) -> str:
    if holder.turn:
        return "Take its turn away? It goes to the end of the line."
    if holder.expiring:
        return "Free it? Its owner is done, and wanted the lock to be held for longer."
    return "Free it? Its body goes on, so two may run at a time."


def _afterwards(holder: Holder, *, ends: bool) -> str:
    if ends or holder.expiring or holder.turn:
        return ""
    if holder.renewed is None:
        return (
            " Its holder learns of it when it renews or releases its lease; until then two may run."
        )
    within = (holder.renewed + holder.remaining) / RENEWALS_PER_TIMEOUT
    return f" Its holder learns of it within {for_people(within)}; until then two may run."


@click.command()
@click.argument("ticket")
@click.option("--key", metavar="KEY", help="Look in the line of this key only.")
@yes
@as_json
@click.pass_context
def drop(
    context: click.Context,
    ticket: str,
    key: str | None,
    yes: bool,  # noqa: FBT001 -- click's flag
    json_: bool,  # noqa: FBT001
) -> None:
    """Take a parked task out of line, or take its turn away.

    TICKET is what `line` shows, or the task's id. The task does not run, and its result is REVOKED.
    If it had its turn, the next in line gets it.

    Exit code 1 if the task is not in line: it runs, or has run, or was dropped.
    """
    with session(context) as opened:
        told = []
        for name, place in _parked(opened, ticket, key):
            lock = opened.overview.lock(name, most=0)
            at = f"place {place.place}" if place.place else "its turn"
            click.echo(
                f"{plain(place.who)}, {at} in line for lock {plain(lock.key)}, parked for "
                f"{for_people(place.waiting)}",
                err=True,
            )
            gone = False
            if agrees("Drop it? It does not run.", sure=yes):
                gone = opened.actions.drop(name, place.ticket)
                if gone:
                    told_of = f"ticket {place.ticket!r} from the line of lock {lock.key!r}"
                    audit(f"dropped the parked task of {told_of}")
                click.echo("Dropped." if gone else "It has left the line meanwhile.", err=True)
            told.append({"key": lock.key, "ticket": place.ticket, "dropped": gone})
        if json_:
            write_json(told)
        if not told:
            click.echo(f"No parked task {plain(ticket)} is in line.", err=True)
        if not any(one["dropped"] for one in told):
            context.exit(FOUND)


@click.command("put-back")
@by_key
@click.option("--ticket", default="", help="Only this one of those that were set aside.")
@as_json
@click.pass_context
def put_back(context: click.Context, /, *, asked: Asked, ticket: str, json_: bool) -> None:
    """Send what was set aside for KEY again.

    For tasks that no worker could read or run, when one can: each goes to the end of the line.

    Exit code 1 if nothing was sent: nothing is set aside, or it cannot be read.
    """
    with session(context) as opened:
        told = []
        for name in asked.names(opened):
            for one, problem in opened.actions.put_back(name, ticket):
                told.append({"ticket": one, "problem": problem or None})
                click.echo(f"{plain(one)}: {plain(problem or 'put back')}", err=json_)
        if json_:
            write_json(told)
        if not told:
            click.echo("Nothing is set aside there.", err=True)
        if all(one["problem"] for one in told):
            context.exit(FOUND)


def _parked(opened: Session, wanted: str, key: str | None) -> Iterator[tuple[str, Waiter]]:
    """Yield each parked task of that ticket or id, with its lock's name in Redis."""
    server = opened.process.store.lock_server
    if not server.keeps_lines:
        raise click.UsageError("Several independent lock servers keep no parked tasks.")
    names = (
        opened.process.lines.names() if key is None else opened.runtime.lock_names([check_key(key)])
    )
    for name in names:
        try:
            found = find_parked(opened.overview, name, wanted)
        except DamagedLockError as exc:
            if key is not None:
                raise
            click.echo(f"Not looked into: {plain(exc)}", err=True)
            continue
        for place in found:
            yield name, place


def agrees(question: str, *, sure: bool) -> bool:
    """Ask, unless the person is sure; what the answer is no to stays as it is."""
    if sure:
        return True
    try:
        agreed = click.confirm(plain(question), err=True)
    except click.Abort:
        click.echo("\nNobody answers: give --yes if you are sure.", err=True)
        agreed = False
    if not agreed:
        click.echo("Left as it is.", err=True)
    return agreed
