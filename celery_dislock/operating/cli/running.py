"""``celery dislock run``: run a command under a lock, as Python runs a ``with`` block."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from celery_dislock.exceptions import LockHeldError, LockLostError
from celery_dislock.locks.making import make_lock
from celery_dislock.operating.cli.child import NOT_FOUND, Child
from celery_dislock.operating.cli.keys import by_key
from celery_dislock.operating.cli.session import duration, session
from celery_dislock.words import plain

if TYPE_CHECKING:
    from celery_dislock.locks.lease import Lease
    from celery_dislock.locks.reentrant import ReentrantLock
    from celery_dislock.operating.cli.keys import WhichLock
    from celery_dislock.operating.cli.session import Session

HELD = 75  # exit code: another holds the lock; EX_TEMPFAIL: try again later
LOST = 76  # exit code: the lock was lost while the command ran

TAKEN_OVER = ("lock_mode", "lock_limit", "lock_watchdog_timeout", "max_renew_times", "lock_expire")


def _or_zero(text: str) -> float:
    return 0.0 if text.strip() == "0" else duration(text)


@click.command(context_settings={"ignore_unknown_options": True})
@by_key
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--timeout",
    type=_or_zero,
    metavar="TIME",
    help="Wait for the lock for this time at most; 0: do not wait. Default: no limit.",
)
@click.option("--mode", type=click.Choice(["exclusive", "shared"]), help="Of the lease.")
@click.option("--limit", type=click.IntRange(min=1), help="Number of leases at a time.")
@click.option(
    "--watchdog-timeout", type=duration, metavar="TIME", help="Expiry of the lease; it is renewed."
)
@click.option("--max-renew-times", type=int, help="Renewals after which it is left to expire.")
@click.option("--expire", type=duration, metavar="TIME", help="A fixed expiry, not renewed.")
@click.option("--unfair", is_flag=True, help="Pass those in line if the lock admits one more.")
@click.option(
    "--grace",
    type=duration,
    default="10",
    show_default=True,
    metavar="TIME",
    help="If the lock is lost: from TERM until KILL.",
)
@click.pass_context
def run(
    context: click.Context,
    /,
    which: WhichLock,
    *,
    command: tuple[str, ...],
    grace: float,
    **terms: Any,
) -> None:
    """Run COMMAND while it holds the lock of KEY.

    As in: celery -A proj dislock run export:7 -- pg_dump shop

    The lock is renewed while COMMAND runs, and released when it ends. COMMAND has DISLOCK_KEY,
    DISLOCK_TOKEN and DISLOCK_OWNER in its environment. Signals are passed on to it. If the lock is
    lost, COMMAND gets TERM, and KILL after --grace. With --task, the options of the task hold
    unless others are given.

    The exit code is that of COMMAND, or 128 + n if signal n has ended it; 75 if another holds the
    lock, 76 if the lock was lost, 126 or 127 if COMMAND cannot be run.
    """
    if command[:1] == ("--",):
        command = command[1:]
    if not command:
        raise click.UsageError("Give the command to run, after --.")
    with session(context) as opened, Child() as child:
        code = _run(_lock(opened, which, **terms), child, command, grace)
    sys.exit(code)


def _lock(
    opened: Session,
    which: WhichLock,
    *,
    timeout: float | None,
    unfair: bool,
    **terms: Any,
) -> ReentrantLock:
    given = {
        "lock_mode": terms["mode"],
        "lock_limit": terms["limit"],
        "lock_watchdog_timeout": terms["watchdog_timeout"],
        "max_renew_times": terms["max_renew_times"],
        "lock_expire": terms["expire"],
    }
    if which.task is not None:
        declared = which.guard(opened).options
        for name in TAKEN_OVER:
            if given[name] is None:
                given[name] = getattr(declared, name)
    keys = list(which.keys(opened))
    one_or_more: Any = keys[0] if len(keys) == 1 else keys
    return make_lock(opened.runtime, one_or_more, given, timeout=timeout, fair=not unfair)


def _run(lock: ReentrantLock, child: Child, command: tuple[str, ...], grace: float) -> int:
    """Run the command under the lock; return the exit code."""
    code = 0
    try:
        with lock as lease:
            code = child.start(command, _environment(lease))
            if code:
                why = "not found" if code == NOT_FOUND else "cannot be run"
                click.echo(f"Error: {plain(command[0])}: {why}", err=True)
                return code
            code = child.wait(lambda: lease.held, grace)
    except LockHeldError as exc:
        click.echo(f"Error: {plain(exc)}", err=True)
        return HELD
    except LockLostError as exc:
        click.echo(
            f"Error: {plain(exc)}. The command has ended with {code}; another may have run "
            "beside it.",
            err=True,
        )
        return LOST
    return code


def _environment(lease: Lease) -> dict[str, str]:
    return {
        "DISLOCK_KEY": lease.key,
        "DISLOCK_TOKEN": str(lease.token),
        "DISLOCK_OWNER": lease.owner,
    }
