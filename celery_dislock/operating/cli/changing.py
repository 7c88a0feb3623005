"""``celery dislock free``, ``drop`` and ``put-back``: leases, reservations, parked tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from celery_dislock.config.options import RENEWALS_PER_TIMEOUT
from celery_dislock.exceptions import DamagedLockError
from celery_dislock.keys.templates import key_of
from celery_dislock.keys.values import check_key
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
from celery_dislock.tasks.actions import ENDED, FREED, RUNS, TERMINATED
from celery_dislock.tasks.handle import WAIT
from celery_dislock.words import for_people, plain

if TYPE_CHECKING:
    from collections.abc import Iterator

    from celery_dislock.operating.cli.keys import WhichLock
    from celery_dislock.operating.cli.session import Session
    from celery_dislock.servers.view import Holder, LockState, ReservationState, Waiter

yes = click.option("--yes", "-y", is_flag=True, help="Do not ask, for scripts.")

LEFT = "left"  # beside what Actions returns: somebody has said no


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
    which: WhichLock,
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
        locks = look_at_all(opened.overview, which.names(opened))
        done = [
            _free(opened, lock, holder, sure=yes, quiet=json_, **how)
            for lock in locks
            for holder in lock.holders
            if token in {None, holder.token}
        ]
        if token is None and all(one["outcome"] != RUNS for one in done):
            done += [
                _end(opened, lock, lock.reservation, sure=yes, quiet=json_)
                for lock in locks
                if lock.reservation is not None
            ]
        if json_:
            write_json(done)
        if not done:
            with_token = "" if token is None else f" with token {token}"
            keys = " + ".join(which.keys(opened))
            click.echo(f"Nobody holds lock {plain(keys)}{with_token}.", err=True)
        if not any(one["outcome"] in {FREED, TERMINATED} for one in done):
            context.exit(FOUND)


def _free(
    opened: Session,
    lock: LockState,
    holder: Holder,
    *,
    sure: bool,
    quiet: bool,
    terminate: bool,
    **how: Any,
) -> dict[str, Any]:
    """Show a lease, ask, and end it; return what became of it, for JSON."""
    key = plain(lock.key)
    click.echo(f"lock {key}", err=True)
    if not quiet:
        write_holder(holder)
    if terminate and holder.can_be_terminated:
        outcome, note = _terminated(opened, lock, holder, sure=sure, **how), ""
    else:
        outcome = _taken_away(opened, lock, holder, sure=sure, terminate=terminate)
        note = _afterwards(holder)
    if outcome == FREED:
        audit(f"freed lock {lock.key!r} of {_of(holder)}")
    said = {
        FREED: f"Freed lock {key}.{note}",
        TERMINATED: f"It has ended. Lock {key} is free, or handed on.",
        ENDED: f"That lease has ended meanwhile. Lock {key} is as it was.",
    }
    if outcome in said:
        click.echo(said[outcome], err=True)
    return {"key": lock.key, "owner": holder.owner, "token": holder.token, "outcome": outcome}


def _taken_away(
    opened: Session, lock: LockState, holder: Holder, *, sure: bool, terminate: bool
) -> str:
    if terminate:
        why = "is no task that a worker runs" if holder.thread else "runs no body now"
        click.echo(f"It cannot be terminated: {plain(holder.who)} {why}.", err=True)
        if not (holder.turn or holder.expiring):
            return RUNS
    if not agrees(_risk(holder), sure=sure):
        return LEFT
    return FREED if opened.actions.free(lock.name, holder.owner, holder.token) else ENDED


def _terminated(
    opened: Session, lock: LockState, holder: Holder, *, sure: bool, signal: str, wait: float
) -> str:
    if not agrees(f"Terminate {holder.who} and free the lock?", sure=sure):
        return LEFT

    def on_sent() -> None:
        audit(f"told the workers to end {_of(holder)}, which holds lock {lock.key!r}")
        click.echo(f"Told the workers to end it; waiting for {for_people(wait)} at most.", err=True)

    end = opened.actions.terminate_and_free
    outcome = end(lock.name, holder, wait=wait, signal=signal, on_sent=on_sent)
    if outcome == RUNS:
        click.echo(
            f"It still holds the lock after {for_people(wait)}: nothing was freed. Its pool "
            "may not be able to end a task (prefork is), its worker may not answer, or the "
            "task may ignore the signal: try --signal KILL. To free the lock all the same, "
            "leave out --terminate; two may run then.",
            err=True,
        )
    elif outcome != TERMINATED:
        click.echo("Its lease is not renewed any more: its process is gone.", err=True)
    return outcome


def _end(
    opened: Session, lock: LockState, reservation: ReservationState, *, sure: bool, quiet: bool
) -> dict[str, Any]:
    """Show a reservation, ask, and end it; return what became of it, for JSON."""
    key, outcome = plain(lock.key), LEFT
    click.echo(f"lock {key}", err=True)
    if not quiet:
        write_reservation(reservation)
    goes_on = {
        "running": "Its task goes on.",
        "ended": "Its task has ended.",
    }.get(reservation.state, "Its message may still wait, and runs then as well.")
    if agrees(f"End the reservation, so that the next message is sent? {goes_on}", sure=sure):
        if opened.actions.end_reservation(lock.name, reservation):
            outcome = FREED
            audit(f"ended the reservation of lock {lock.key!r} for task {reservation.id!r}")
            click.echo(f"Ended the reservation of {key}.", err=True)
        else:
            outcome = ENDED
            click.echo(f"That reservation of {key} has ended meanwhile.", err=True)
    return {"key": lock.key, "reserved_for": reservation.id, "outcome": outcome}


def _of(holder: Holder) -> str:
    return f"{holder.who!r} (owner {holder.owner!r}, token {holder.token})"


def _risk(holder: Holder) -> str:
    if holder.turn:
        return "Take its turn away? It goes to the end of the line."
    if holder.expiring:
        return "Free it? Its owner is done, and wanted the lock to be held for longer."
    return "Free it? Its body goes on, so two may run at a time."


def _afterwards(holder: Holder) -> str:
    if holder.expiring or holder.turn:
        return ""
    when = "when it renews or releases its lease"
    if holder.timeout is not None:
        when = f"within {for_people(holder.timeout / RENEWALS_PER_TIMEOUT)}"
    return f" Its holder learns of it {when}; until then two may run."


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
        done = []
        for name, place in _parked(opened, ticket, key):
            locked = key_of(name)
            at = f"place {place.place}" if place.place else "its turn"
            click.echo(
                f"{plain(place.who)}, {at} in line for lock {plain(locked)}, parked for "
                f"{for_people(place.waiting)}",
                err=True,
            )
            gone = False
            if agrees("Drop it? It does not run.", sure=yes):
                gone = opened.actions.drop(name, place.ticket)
                if gone:
                    parked = f"ticket {place.ticket!r} from the line of lock {locked!r}"
                    audit(f"dropped the parked task of {parked}")
                click.echo("Dropped." if gone else "It has left the line meanwhile.", err=True)
            done.append({"key": locked, "ticket": place.ticket, "dropped": gone})
        if json_:
            write_json(done)
        if not done:
            click.echo(f"No parked task {plain(ticket)} is in line.", err=True)
        if not any(one["dropped"] for one in done):
            context.exit(FOUND)


@click.command("put-back")
@by_key
@click.option("--ticket", default="", help="Only this one of those that were set aside.")
@as_json
@click.pass_context
def put_back(context: click.Context, /, *, which: WhichLock, ticket: str, json_: bool) -> None:
    """Send what was set aside for KEY again.

    For tasks that no worker could read or run, when one can: each goes to the end of the line.

    Exit code 1 if nothing was sent: nothing is set aside, or it cannot be read.
    """
    with session(context) as opened:
        done = []
        for name in which.names(opened):
            for one, problem in opened.actions.put_back(name, ticket):
                done.append({"ticket": one, "problem": problem or None})
                click.echo(f"{plain(one)}: {plain(problem or 'put back')}", err=json_)
        if json_:
            write_json(done)
        if not done:
            click.echo("Nothing is set aside there.", err=True)
        if all(one["problem"] for one in done):
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
