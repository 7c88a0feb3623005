"""The commands that say who may have a lock, and when: `pause`, `limit` and `resume`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from celery_dislock.config.terms import LIMIT_MOST, Rate
from celery_dislock.keys.templates import key_of
from celery_dislock.operating import audit
from celery_dislock.operating.cli.session import (
    WhichLock,
    as_json,
    by_key,
    duration,
    record,
    session,
    user,
    write_json,
    write_remark,
)
from celery_dislock.operating.locks import as_data
from celery_dislock.servers.view import is_beat
from celery_dislock.words import for_people, plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from celery_dislock.operating.locks import AppLocks
    from celery_dislock.servers.view import LockState

for_ = click.option(
    "--for",
    "seconds",
    type=duration,
    metavar="TIME",
    help="Take it back after this time: 90, 10m, 2h. Default: it lasts until `resume`.",
)
note = click.option("--note", default="", help="Why: shown to people and to tasks it refuses.")

WILDCARDS = frozenset("*?[")  # of the patterns of `ls`


def a_rate(text: str) -> Rate:
    """Read a rate from the command line: ``100/m``, ``5/10s``."""
    try:
        return Rate.of(text)
    except ValueError as exc:
        raise click.BadParameter(f"{text!r} cannot be used: {exc}") from exc


@click.command()
@by_key
@for_
@note
@as_json
@click.pass_context
def pause(context: click.Context, /, which: WhichLock, **given: Any) -> None:
    """Let nobody take the lock of KEY.

    Who has the lock keeps it. Tasks that wait or are parked stay in line. Beats send nothing.
    With --for it is held back, and who is in line starts at the end of that time.
    """
    _set(context, which, 0, **given)


@click.command()
@click.argument("key")
@click.argument("number", type=click.IntRange(0, LIMIT_MOST), required=False)
@click.option("--rate", type=a_rate, metavar="RATE", help="Starts in any window: 100/m, 5/10s.")
@for_
@note
@as_json
@click.pass_context
def limit(context: click.Context, /, key: str, number: int | None, **given: Any) -> None:
    """Admit NUMBER leases of KEY at a time, or another rate of starts.

    Give NUMBER, --rate, or both: they hold whatever the code says, until `resume`. 0 is the same as
    `pause`. Leases count by their cost. Shared leases count for a rate, and not for NUMBER.
    """
    if number is None and given["rate"] is None:
        raise click.UsageError("Give NUMBER, or --rate, or both.")
    _set(context, WhichLock(key), number, **given)


@click.command()
@by_key
@as_json
@click.pass_context
def resume(context: click.Context, /, which: WhichLock, *, json_: bool) -> None:
    """Take back the pause, the limit and the rate of KEY.

    The limit and the rate of the code hold again. A hold-back ends, too.
    """
    done: list[dict[str, Any]] = []
    with session(context) as opened:
        for name in _names(opened, which, sets=False):
            seen = opened.overview.lock(name, most=0).rate
            about: dict[str, Any] = {"key": key_of(name), "limit": None}
            about["before"] = opened.actions.limit(name, None)
            record(audit.log_limit(name, None, ""))
            if seen is not None and seen.since is not None:
                about |= {"rate": None, "rate_before": opened.actions.rate(name, None)}
                about["held_back_before"] = seen.held_back
                record(audit.rated(name, None, ""))
            done.append({**about, "seconds": None})
            if not json_:
                past = " ".join(_before(about)) or "Nobody had set another."
                back = f"Lock {about['key']} has the limit and rate of the code again."
                click.echo(plain(f"{back} {past}"))
    if json_:
        write_json(as_data(done))


def _set(
    context: click.Context,
    which: WhichLock,
    number: int | None,
    *,
    json_: bool,
    rate: Rate | None = None,
    seconds: float | None = None,
    note: str = "",
) -> None:
    by = audit.signed(user(), note)
    done: list[dict[str, Any]] = []
    with session(context) as opened:
        for name in _names(opened, which):
            lock = opened.overview.lock(name, most=0)
            about: dict[str, Any] = {"key": lock.key}
            if rate is not None:
                before = opened.actions.rate(name, rate, seconds=seconds, note=by)
                about |= {"rate": rate, "rate_before": before}
                record(audit.rated(name, rate, by, seconds))
            if number is not None:
                about["limit"] = number
                about["before"] = opened.actions.limit(name, number, seconds=seconds, note=by)
                record(audit.log_limit(name, number, by, seconds))
            done.append({**about, "seconds": seconds})
            if not json_:
                click.echo(plain(" ".join([_now(lock, number, rate, seconds), *_before(about)])))
    if json_:
        write_json(as_data(done))


def _now(lock: LockState, number: int | None, rate: Rate | None, seconds: float | None) -> str:
    """Say what holds from now on for a lock, and for how long."""
    lasts = f"until: celery dislock resume {lock.argument}"
    if seconds:
        lasts = f"for {for_people(seconds)}"
    admits = [f"{number} at a time"] if number else []
    admits += [str(rate)] if rate else []
    # By beats, now or within thirty days.
    is_led = lock.ticked is not None or any(map(is_beat, lock.holders))
    stops = "The beat that leads by it sends nothing more, and the others nothing, either."
    then = stops if is_led else "Who has the lock keeps it."
    now = [f"is paused {lasts}. {then}"] if number == 0 else []
    now += [f"admits {' and '.join(admits)}, {lasts}."] if admits else []
    held_back = lock.rate.held_back if lock.rate is not None and number != 0 else 0.0
    barred = f" It is held back for {for_people(held_back)} more." if held_back else ""
    return f"Lock {lock.key} {' It '.join(now)}{barred}"


def _before(done: dict[str, Any]) -> list[str]:
    """Say what somebody had set until then."""
    limit, rate = done.get("before"), done.get("rate_before")
    told = [] if limit is None else [f"It admitted {limit}." if limit else "It was paused."]
    told += [] if rate is None else [f"Its rate was {rate}."]
    return told + (["It was held back."] if done.get("held_back_before") else [])


def _names(opened: AppLocks, which: WhichLock, *, sets: bool = True) -> Sequence[str]:
    """Return the names of the locks; warn if nothing is known of a key, refuse a pattern."""
    names, key = which.names(opened), which.key
    if key is None or opened.overview.lock(names[0], most=0).exists:
        return names
    if set(key) & WILDCARDS:
        raise click.UsageError(
            f"{plain(key)} looks like a pattern, and no lock has it as its key. "
            "Give one key; `celery dislock ls PATTERN` lists them."
        )
    if sets:
        nobody = f"Warning: nobody holds, awaits or reserves lock {key} now."
        write_remark(f"{nobody} If its key is another: celery dislock ls")
    return names
