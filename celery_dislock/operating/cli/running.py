"""``celery dislock run``: run a command under a lock, as Python runs a ``with`` block.

The command is a child of this process, in a process group of its own.  What it starts is in that
group, so all of it gets the signals and is ended with it.  The group has no terminal of its own:
Ctrl-C reaches this process, which passes it on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from celery_dislock.config.plain import of_task
from celery_dislock.config.settings import nearer
from celery_dislock.exceptions import LockHeldError, LockLostError
from celery_dislock.locks.reentrant import ReentrantLock
from celery_dislock.operating.cli.session import by_key, duration, session, write_remark

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from typing_extensions import Self

    from celery_dislock.config.options import TaskOptions
    from celery_dislock.operating.cli.session import WhichLock

PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
STOP = {"SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"}  # of these, what ends us while there is no child
LOOK_EVERY = 0.1  # seconds

EXIT_HELD = 75  # exit code: another holds the lock; EX_TEMPFAIL: try again later
EXIT_LOST = 76  # exit code: the lock was lost while the command ran
CANNOT_RUN, NOT_FOUND = 126, 127  # exit codes, as in shells
BY_SIGNAL = 128  # plus the signal's number


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
    "--mode", type=click.Choice(["exclusive", "shared"]), help="Side of a read-write lock."
)
@click.option("--limit", type=click.IntRange(min=1), help="Maximum number of leases at a time.")
@click.option("--rate", metavar="RATE", help="How often it is taken at most: 100/m, 5/10s.")
@click.option(
    "--cost", type=click.IntRange(min=1), help="What it counts for of the limit and the rate."
)
@click.option(
    "--watchdog-timeout",
    type=duration,
    metavar="TIME",
    help="Expiry of the lease, which is renewed after each third of it.",
)
@click.option("--max-renew-times", type=int, help="Renewals until it is left to expire.")
@click.option(
    "--expire",
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
    help="If the lock is lost: time from SIGTERM to SIGKILL.",
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
    **options: Any,
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
        if declared := which.options(opened):
            options = _with_those_of(declared, options)
        keys = list(which.keys(opened))
        one_or_more: Any = keys[0] if len(keys) == 1 else keys
        options.update(timeout=timeout, fair=not unfair)
        lock = ReentrantLock(opened.runtime, one_or_more, options)
        code = _run(lock, child, command, grace)
    sys.exit(code)


def _with_those_of(task: TaskOptions, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a task's lock, but those that have no effect beside what is given."""
    stated = {of_task(name): value for name, value in given.items() if value is not None}
    own = {of_task(name): getattr(task, of_task(name)) for name in given}
    own = nearer(own, {name: own[name] for name in ("lock_expire", "lock_mode")})
    merged = nearer(own, stated)
    return {name: merged.get(of_task(name)) for name in given}


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
            try:
                child.start(command, environment)
            except OSError as exc:
                is_missing = isinstance(exc, FileNotFoundError)
                why = "not found" if is_missing else "cannot be run"
                write_remark(f"Error: {command[0]}: {why}")
                return NOT_FOUND if is_missing else CANNOT_RUN
            code = child.wait(lambda: lease.held, grace)
            lease.ensure_held()
    except LockHeldError as exc:
        write_remark(f"Error: {exc}")
        return EXIT_HELD
    except LockLostError as exc:
        write_remark(
            f"Error: {exc}. The command has ended with {code}; another may have run beside it."
        )
        return EXIT_LOST
    return code


class Child:
    """
    Passes signals on to a command.  A context manager; for the main thread.

    A signal that this process ignores is ignored by the command, too.  One that comes before the
    command has begun ends this process, with SystemExit.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._came: list[int] | None = None  # while the command is started
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for name in PASSED_ON:
            number = getattr(signal, name)
            if signal.getsignal(number) is not signal.SIG_IGN:  # as HUP under nohup
                self._before[number] = signal.signal(number, self._got)
        return self

    def __exit__(self, *_exc_info: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _got(self, number: int, _frame: object) -> None:
        if self._process is not None:
            self._send(number)
        elif self._came is not None:
            self._came.append(number)
        elif signal.Signals(number).name in STOP:
            raise SystemExit(BY_SIGNAL + number)

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """
        Start the command.

        Args:
            command: The program and its arguments; no shell reads them.
            environment: Variables beside those of this process.

        Raises:
            OSError: It cannot be started.
        """
        self._came = []
        self._process = subprocess.Popen(  # noqa: S603 -- it is what the command is for
            command, env={**os.environ, **environment}, start_new_session=True
        )
        for number in self._came:
            self._send(number)

    def wait(self, goes_on: Callable[[], bool], grace: float) -> int:
        """
        Wait until the command has ended; end it when it must not go on.

        Args:
            goes_on: Asked all the time; False: the command gets TERM.
            grace: Seconds from TERM until KILL.

        Returns:
            Its exit code; 128 + n if signal n has ended it.
        """
        assert self._process is not None  # noqa: S101 -- it was started
        kill_at = None
        while True:
            with suppress(subprocess.TimeoutExpired):
                code = self._process.wait(LOOK_EVERY)
                if kill_at is not None:
                    self._send(signal.SIGKILL)  # what it has left behind in its group
                return code if code >= 0 else BY_SIGNAL - code
            if kill_at is None and not goes_on():
                self._send(signal.SIGTERM)
                kill_at = time.monotonic() + grace
            elif kill_at is not None and time.monotonic() >= kill_at:
                self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
