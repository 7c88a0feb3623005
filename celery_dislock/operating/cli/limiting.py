"""The commands that say how many may have a lock: `pause`, `resume` and `limit`."""

from __future__ import annotations

from typing import Any

import click

from celery_dislock.config.terms import LIMIT_MOST
from celery_dislock.keys.templates import key_of
from celery_dislock.operating.cli.session import (
    WhichLock,
    as_json,
    audit,
    by_key,
    duration,
    session,
    tell,
    user,
    write_json,
)
from celery_dislock.operating.locks import limited, signed
from celery_dislock.words import for_people, plain

for_ = click.option(
    "--for",
    "seconds",
    type=duration,
    metavar="TIME",
    help="Take it back after this time: 90, 10m, 2h. Default: it lasts until `resume`.",
)
note = click.option("--note", default="", help="Why: shown to people and to tasks it refuses.")

WILDCARDS = frozenset("*?[")  # of the patterns of `ls`


@click.command()
@by_key
@for_
@note
@as_json
@click.pass_context
def pause(context: click.Context, /, which: WhichLock, **given: Any) -> None:
    """Let nobody take the lock of KEY.

    Who has the lock keeps it. Tasks that wait or are parked stay in line.
    """
    _set(context, which, 0, **given)


@click.command()
@by_key
@as_json
@click.pass_context
def resume(context: click.Context, /, which: WhichLock, *, json_: bool) -> None:
    """Take back the pause or the limit of KEY.

    The limit of the code holds again.
    """
    _set(context, which, None, json_=json_)


@click.command()
@click.argument("key")
@click.argument("number", type=click.IntRange(0, LIMIT_MOST))
@for_
@note
@as_json
@click.pass_context
def limit(context: click.Context, /, key: str, number: int, **given: Any) -> None:
    """Admit NUMBER leases of KEY at a time, whatever the code says.

    0 is the same as `pause`. `resume` takes it back. Shared leases are not counted.
    """
    _set(context, WhichLock(key, None, (), {}), number, **given)


def _set(
    context: click.Context,
    which: WhichLock,
    number: int | None,
    *,
    json_: bool,
    seconds: float | None = None,
    note: str = "",
) -> None:
    by = "" if number is None else signed(user(), note)
    done: list[dict[str, Any]] = []
    with session(context) as opened:
        names = which.names(opened)
        if not which.is_known(opened):
            _doubt(str(which.key), sets=number is not None)
        for name in names:
            before = opened.actions.limit(name, number, seconds=seconds, note=by)
            audit(limited(name, number, by, seconds))
            about = {"key": key_of(name), "limit": number, "before": before}
            done.append({**about, "seconds": seconds})
    if json_:
        write_json(done)
        return
    for key, before in ((one["key"], one["before"]) for one in done):
        lasts = f"for {for_people(seconds)}" if seconds else f"until: celery dislock resume {key}"
        now = {
            None: "has the limit of the code again",
            0: f"is paused {lasts}. Who has the lock keeps it",
        }.get(number, f"admits {number} at a time, {lasts}")
        none = " Nobody had set another." if number is None else ""
        past = {None: none, 0: " It was paused."}.get(before, f" It admitted {before}.")
        click.echo(plain(f"Lock {key} {now}.{past}"))


def _doubt(key: str, *, sets: bool) -> None:
    """Warn that nothing is known of a key; refuse one that looks like a pattern."""
    if set(key) & WILDCARDS:
        raise click.UsageError(
            f"{plain(key)} looks like a pattern, and no lock has it as its key. "
            "Give one key; `celery dislock ls PATTERN` lists them."
        )
    if sets:
        nobody = f"Warning: nobody holds, awaits or reserves lock {key} now."
        tell(f"{nobody} If its key is another: celery dislock ls")
