"""The commands that end what there is: `free`, `drop` and `put-back`."""

from __future__ import annotations

from signal import Signals
from typing import TYPE_CHECKING, Any

import click

from celery_dislock.config.options import RENEWALS_PER_TIMEOUT
from celery_dislock.exceptions import DamagedLockError
from celery_dislock.keys.names import task_id_of
from celery_dislock.operating import audit
from celery_dislock.operating.cli.reading import holder_lines, reservation_line, write_lines
from celery_dislock.operating.cli.session import (
    FOUND,
    WhichLock,
    as_json,
    by_key,
    duration,
    record,
    session,
    write_json,
    write_remark,
)
from celery_dislock.servers.find import Search
from celery_dislock.servers.overview import SEARCHED, look_at_all
from celery_dislock.servers.waiters import ticket_of_member
from celery_dislock.tasks.actions import ENDED_MEANWHILE, FREED, STILL_RUNS, TERMINATED, WAIT
from celery_dislock.words import for_people, plain

if TYPE_CHECKING:
    from collections.abc import Iterator

    from celery_dislock.operating.locks import AppLocks
    from celery_dislock.servers.overview import Overview
    from celery_dislock.servers.view import Holder, LockState, ReservationState
    from celery_dislock.servers.waiters import Standing

yes = click.option("--yes", "-y", is_flag=True, help="Do not ask, for scripts.")

LEFT = "left"  # beside what Actions returns: somebody has said no
OUTCOMES = {
    FREED: "Freed lock {key}.{told}",
    TERMINATED: "It has ended. Lock {key} is free, or handed on.",
    ENDED_MEANWHILE: "That lease has ended meanwhile. Lock {key} is as it was.",
    STILL_RUNS: "It still holds the lock after {wait}: nothing was freed. Its pool may not be able "
    "to end a task (prefork is), its worker may not answer, or the task may ignore the signal: try "
    "--signal KILL. To free the lock all the same, leave out --terminate; two may run then.",
}


def a_signal(text: str) -> str:
    """Read a signal from the command line, as ``kill`` does; return the name that workers know."""
    found = {text, f"SIG{text.upper().removeprefix('SIG')}"}
    for signal in Signals:
        if not found.isdisjoint({str(signal.value), signal.name}):
            return signal.name.removeprefix("SIG")
    raise click.BadParameter(f"{plain(text)} is no signal; give TERM, INT, QUIT or KILL")


@click.command()
@by_key
@click.option(
    "--terminate",
    is_flag=True,
    help="Tell the workers to end the task first, and wait until it has released the lock.",
)
@click.option(
    "--signal",
    type=a_signal,
    default="TERM",
    metavar="TEXT",
    show_default=True,
    help="With --terminate: the signal.",
)
@click.option(
    "--wait",
    type=duration,
    default=f"{WAIT:g}",
    metavar="TIME",
    show_default=True,
    help="With --terminate: how long to wait until it has ended; then nothing is freed.",
)
@click.option(
    "--token", type=int, help="Only the lease with this fencing token, and no reservation."
)
@click.option("--reservation", is_flag=True, help="Only the reservation of KEY, and no lease.")
@yes
@as_json
@click.pass_context
def free(
    context: click.Context,
    /,
    which: WhichLock,
    *,
    token: int | None,
    reservation: bool,
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
    done: list[dict[str, Any]] = []
    with session(context) as opened:
        locks = look_at_all(opened.overview.server, which.names(opened))
        for lock in [] if reservation else locks:
            for holder in lock.holders:
                if token in {None, holder.token}:
                    _show(lock, holder_lines(holder), quiet=json_)
                    outcome = _free(opened, lock, holder, sure=yes, **how)
                    about = {"owner": holder.owner, "token": holder.token}
                    done.append({"key": lock.key, **about, "outcome": outcome})
        stays = token is not None or any(row["outcome"] == STILL_RUNS for row in done)
        for lock in [] if stays else locks:
            if reserved := lock.reservation:
                _show(lock, iter([reservation_line(reserved)]), quiet=json_)
                outcome = _end(opened, lock, reserved, sure=yes)
                done.append({"key": lock.key, "reserved_for": reserved.id, "outcome": outcome})
        if json_:
            write_json(done)
        if not done:
            with_token = "" if token is None else f" with token {token}"
            key = " + ".join(which.keys(opened))
            nobody = f"Nobody holds lock {key}{with_token}."
            write_remark(f"Key {key} is not reserved." if reservation else nobody)
        if not any(row["outcome"] in {FREED, TERMINATED} for row in done):
            context.exit(FOUND)


def _show(lock: LockState, lines: Iterator[str], *, quiet: bool) -> None:
    write_remark(f"lock {lock.key}")
    if not quiet:
        write_lines(lines)


def _free(
    opened: AppLocks,
    lock: LockState,
    holder: Holder,
    *,
    sure: bool,
    terminate: bool,
    signal: str,
    wait: float,
) -> str:
    """Ask, and end a lease that was shown; return what became of it."""
    if terminate and not holder.can_be_terminated:
        why = "is no task that a worker runs" if holder.thread else "runs no body now"
        write_remark(f"It cannot be terminated: {holder.who} {why}.")
        if holder.may_live:
            return STILL_RUNS
        terminate = False
    if not agrees(_question(holder, terminate=terminate), sure=sure):
        return LEFT

    def on_sent() -> None:
        record(audit.terminated(lock.name, holder))
        write_remark(f"Told the workers to end it; waiting for {for_people(wait)} at most.")

    told = ""
    if terminate:
        end = opened.actions.terminate_and_free
        outcome = end(lock.name, holder, wait=wait, signal=signal, on_sent=on_sent)
        if outcome in {FREED, ENDED_MEANWHILE}:
            write_remark("Its body has ended.")
    else:
        is_freed = opened.actions.free(lock.name, holder.owner, holder.token)
        outcome = FREED if is_freed else ENDED_MEANWHILE
        told = _afterwards(holder) if holder.may_live else ""
    if outcome == FREED:
        record(audit.freed(lock.name, holder))
    write_remark(OUTCOMES[outcome].format(key=lock.key, wait=for_people(wait), told=told))
    return outcome


def _question(holder: Holder, *, terminate: bool) -> str:
    if terminate:
        return f"Terminate {holder.who} and free the lock?"
    if holder.is_kept:
        return "Take it away? The task gives back all that it keeps, and waits anew."
    if holder.turn:
        return "Take its turn away? It goes to the end of the line."
    if holder.expiring:
        return "Free it? Its owner is done, and wanted the lock to be held for longer."
    return "Free it? Its body goes on, so two may run at a time."


def _afterwards(holder: Holder) -> str:
    when = "when it renews or releases its lease"
    if holder.timeout is not None:
        when = f"within {for_people(holder.timeout / RENEWALS_PER_TIMEOUT)}"
    return f" Its holder learns of it {when}; until then two may run."


def _end(opened: AppLocks, lock: LockState, shown: ReservationState, *, sure: bool) -> str:
    """Ask, and end a reservation that was shown; return what became of it."""
    goes_on = {
        "running": "Its task goes on.",
        "ended": "Its task has ended.",
    }.get(shown.state, "Its message may still wait, and runs then as well.")
    if not agrees(f"End the reservation, so that the next message is sent? {goes_on}", sure=sure):
        return LEFT
    if not opened.actions.end_reservation(lock.name, shown):
        write_remark(f"That reservation of {lock.key} has ended meanwhile.")
        return ENDED_MEANWHILE
    record(audit.unreserved(lock.name, shown.id))
    write_remark(f"Ended the reservation of {lock.key}.")
    return FREED


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
    done = []
    with session(context) as opened:
        for found in _parked(opened, ticket, key):
            place, at = found.waiter, found.place
            where = f"place {at.nth}" if at.nth else "its turn"
            since = for_people(place.parked_for)
            keeps = f", keeps {', '.join(place.keeps)}" if place.keeps and at.nth else ""
            write_remark(
                f"{place.who}, {where} in line for lock {at.key}{keeps}, parked for {since}"
            )
            gone = False
            if agrees("Drop it? It does not run.", sure=yes):
                gone = opened.actions.drop(found.lock, place.ticket, beside=place.beside)
                if gone:
                    record(audit.dropped(found.lock, place.ticket))
                write_remark("Dropped." if gone else "It has left the line meanwhile.")
            done.append({"key": at.key, "ticket": place.ticket, "dropped": gone})
        if json_:
            write_json(done)
        if not done:
            write_remark(f"No parked task {ticket} is in line.")
        if not any(row["dropped"] for row in done):
            context.exit(FOUND)


@click.command("put-back")
@by_key
@click.option("--ticket", default="", help="Only this one of those that were set aside.")
@as_json
@click.pass_context
def put_back(context: click.Context, /, *, which: WhichLock, ticket: str, json_: bool) -> None:
    """Put what was set aside for KEY back in line.

    For tasks that no worker could run, when all of their queue can: each goes to the end.

    Exit code 1 if nothing was put back: nothing is set aside, or it cannot be read.
    """
    with session(context) as opened:
        done = []
        for name in which.names(opened):
            for ticket_id, problem in opened.actions.put_back(name, ticket):
                done.append({"ticket": ticket_id, "problem": problem or None})
                click.echo(f"{plain(ticket_id)}: {plain(problem or 'put back')}", err=json_)
        if json_:
            write_json(done)
        if not done:
            write_remark("Nothing is set aside there.")
        if all(row["problem"] for row in done):
            context.exit(FOUND)


def _parked(opened: AppLocks, wanted: str, key: str | None) -> Iterator[Standing]:
    """Yield where each parked task of that ticket or id stands."""
    if not opened.process.store.lock_server.keeps_lines:
        raise click.UsageError("Several independent lock servers keep no parked tasks.")
    names = opened.process.lines.names() if key is None else WhichLock(key).names(opened)
    search = Search(opened.overview.server, opened.overview.prefix, wanted)
    seen: set[tuple[str, str]] = set()
    for name in names:
        try:
            new = set(_tickets(opened.overview, name, wanted)) - seen
            seen |= new  # it is found from each lock that it keeps
            for home, ticket in sorted(new):
                found = search.where(home, f"{ticket}#")
                if found is not None and not found.is_lost:
                    yield found
        except DamagedLockError as exc:
            if key is not None:
                raise
            write_remark(f"Not looked into: {exc}")


def _tickets(overview: Overview, name: str, wanted: str) -> Iterator[tuple[str, str]]:
    """
    Yield the tickets of a task, or this ticket, that wait for a lock or keep it; reads in pages.

    Each comes after the name of the lock that has its record.
    """
    first, waiting = 0, 1
    while first < waiting:
        lock = overview.lock(name, first, SEARCHED)
        there = [
            (place.ticket, place.beside) for place in (*lock.turns, *lock.line) if place.parked
        ]
        there += [ticket_of_member(holder.owner.encode()) for holder in lock.holders if holder.turn]
        for ticket, beside in there:
            if wanted in {ticket, task_id_of(ticket)}:
                yield beside or name, ticket
        first, waiting = first + SEARCHED, lock.waiting


def agrees(question: str, *, sure: bool) -> bool:
    """Ask, unless the person is sure; after a no, say that nothing is changed."""
    if sure:
        return True
    try:
        agreed = click.confirm(plain(question), err=True)
    except click.Abort:
        write_remark("")
        write_remark("Nobody answers: give --yes if you are sure.")
        agreed = False
    if not agreed:
        write_remark("Left as it is.")
    return agreed
