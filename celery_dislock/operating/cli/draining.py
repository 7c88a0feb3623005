"""``celery dislock drain``: parked tasks of another lock server or prefix."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import click

from celery_dislock.keys.templates import key_of
from celery_dislock.messages.headers import STORE_NAME
from celery_dislock.operating.cli.changing import agrees, yes
from celery_dislock.operating.cli.session import (
    FOUND,
    as_json,
    audit,
    duration,
    session,
    tell,
    write_json,
    write_table,
)
from celery_dislock.operating.draining import Drain
from celery_dislock.words import for_people, plain


@click.command()
@click.option("--from-url", metavar="URL", help="The lock server that the workers used before.")
@click.option("--from-prefix", metavar="PREFIX", help="The dislock_prefix that they had before.")
@click.option(
    "--lost",
    metavar="NAME",
    help="The lines are lost with their server: tasks of the store of this name, which the log and "
    "doctor name, belong here.",
)
@click.option(
    "--look-for",
    type=duration,
    metavar="TIME",
    help="How long to look for workers with the old settings. Default: half the timeout.",
)
@yes
@as_json
@click.pass_context
def drain(
    context: click.Context,
    /,
    *,
    from_url: str | None,
    from_prefix: str | None,
    lost: str | None,
    look_for: float | None,
    **given: bool,
) -> None:
    """Send on what is parked on another lock server, or under another prefix.

    For the time after a change of dislock_url or dislock_prefix, when the last worker with the old
    settings has stopped. Shows the lines that were left, and asks. Each task gets its turn for its
    key under the settings of now.

    Exit code 1 if a worker still uses those lines, or if something was left there.
    """
    if lost is not None:
        _take_over(context, lost)
        return
    if from_url is None and from_prefix is None:
        raise click.UsageError("Say where the tasks are: --from-url URL, --from-prefix PREFIX.")
    with session(context) as opened, closing(Drain(opened.app, from_url, from_prefix)) as draining:
        seconds = look_for or 1.5 * draining.interval
        if not _drained(draining, seconds, sure=given["yes"], in_json=given["json_"]):
            context.exit(FOUND)


def _take_over(context: click.Context, name: str) -> None:
    if not STORE_NAME.fullmatch(name):
        raise click.UsageError(
            f"{plain(name)} is no name of a store: it has 16 digits, 0-9 and a-f."
        )
    with session(context) as opened:
        if not opened.process.can_park:
            raise click.UsageError("Several independent lock servers keep no parked tasks.")
        opened.process.identity.take_over(name)
        audit(f"took over the tasks of the lost store {name}")
    tell(f"Tasks on their way from store {name} belong here now.")


def _drained(draining: Drain, seconds: float, *, sure: bool, in_json: bool) -> bool:
    """Tell whether nothing is left there."""
    draining.check()
    parked = [(lock.key, lock.waiting + len(lock.turns)) for lock in draining.lines()]
    if parked and not in_json:
        write_table({"KEY": lambda key, _: key, "IN LINE": lambda _, many: many}, parked)
    there = draining.there
    tell(f"Looking for {for_people(seconds)} whether a worker still uses {there}.")
    if workers := draining.workers(seconds):
        names = ", ".join(sorted({one.worker or one.who for one in workers}))
        tell(
            f"A worker still uses it: {names}. Stop the workers with the old settings first. "
            "One that was killed is seen until its leases have ended."
        )
        return False
    tell(f"{sum(many for _, many in parked)} parked in {len(parked)} lines on {there}.")
    if not agrees(f"Send them on, to {draining.here}?", sure=sure):
        return False
    done: list[dict[str, Any]] = []
    for one in draining.run():
        done.append({"key": key_of(one.lock), "ticket": one.ticket, "problem": one.problem or None})
        if one.problem:
            what = f"{one.ticket} is set aside there" if one.ticket else "Left there"
            tell(f"{what}: {one.problem}")
    sent = sum(one["problem"] is None for one in done)
    audit(f"sent on {sent} parked tasks from {there!r} to {draining.here!r}")
    if in_json:
        write_json(done)
    tell(f"Sent on {sent}. What is on its way from there belongs here now.")
    return sent == len(done)
