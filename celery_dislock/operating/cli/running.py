"""``celery dislock run``: run a command under a lock, as Python runs a ``with`` block."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from celery_dislock.exceptions import LockHeldError, LockLostError
from celery_dislock.locks.making import make_lock
from celery_dislock.operating.cli.child import NOT_FOUND, Child
from celery_dislock.operating.cli.keys import by_key
from celery_dislock.operating.cli.session import duration, session, tell

if TYPE_CHECKING:
    from celery_dislock.locks.reentrant import ReentrantLock
    from celery_dislock.operating.cli.keys import WhichLock

HELD = 75  # exit code: another holds the lock; EX_TEMPFAIL: try again later
LOST = 76  # exit code: the lock was lost while the command ran


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
@click.option(
    "--mode", "lock_mode", type=click.Choice(["exclusive", "shared"]), help="Of the lease."
)
@click.option(
    "--limit", "lock_limit", type=click.IntRange(min=1), help="Number of leases at a time."
)
@click.option(
    "--watchdog-timeout",
    "lock_watchdog_timeout",
    type=duration,
    metavar="TIME",
    help="Expiry of the lease; it is renewed.",
)
@click.option("--max-renew-times", type=int, help="Renewals after which it is left to expire.")
@click.option(
    "--expire",
    "lock_expire",
    type=duration,
    metavar="TIME",
    help="A fixed expiry, not renewed.",
)
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
    timeout: float | None,
    unfair: bool,
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
        if which.task is not None:
            declared = which.guard(opened).options
            for name, given in terms.items():
                terms[name] = getattr(declared, name) if given is None else given
        keys = list(which.keys(opened))
        one_or_more: Any = keys[0] if len(keys) == 1 else keys
        lock = make_lock(opened.runtime, one_or_more, terms, timeout=timeout, fair=not unfair)
        code = _run(lock, child, command, grace)
    sys.exit(code)


def _run(lock: ReentrantLock, child: Child, command: tuple[str, ...], grace: float) -> int:
    """Run the command under the lock; return the exit code."""
    code = 0
    try:
        with lock as lease:
            environment = {
                "DISLOCK_KEY": lease.key,
                "DISLOCK_TOKEN": str(lease.token),
                "DISLOCK_OWNER": lease.owner,
            }
            code = child.start(command, environment)
            if code:
                why = "not found" if code == NOT_FOUND else "cannot be run"
                tell(f"Error: {command[0]}: {why}")
                return code
            code = child.wait(lambda: lease.held, grace)
    except LockHeldError as exc:
        tell(f"Error: {exc}")
        return HELD
    except LockLostError as exc:
        tell(f"Error: {exc}. The command has ended with {code}; another may have run beside it.")
        return LOST
    return code
