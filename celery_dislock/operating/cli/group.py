"""The command ``celery dislock``, to which the commands of this package belong.

All read the lock server, and need no worker.  The app that ``-A`` names tells where the lock server
is; it need not have made a ``Dislock``.

Exit codes: 0 done; 1 a finding, or nothing to do it to; 2 wrong usage; 3 the lock server, or the
broker that was needed, did not answer.  ``run`` has more.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress
from typing import Any

import click

from celery_dislock.config.settings import apply_options
from celery_dislock.operating.cli.changing import drop, free, put_back
from celery_dislock.operating.cli.doctor import doctor
from celery_dislock.operating.cli.limiting import limit, pause, resume
from celery_dislock.operating.cli.reading import line, ls, show
from celery_dislock.operating.cli.running import run
from celery_dislock.operating.cli.web import web
from celery_dislock.operating.cli.why import why


class _Commands(click.Group):
    """The commands; one whose output cannot be written ends with a message."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except OSError as exc:
            if exc.errno == errno.EPIPE:  # `| head`, which click knows
                raise
            with suppress(OSError, ValueError):  # what is not written yet fails again at the exit
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            what = exc.strerror or type(exc).__name__
            raise click.ClickException(f"the output could not be written: {what}") from exc


@click.group(name="dislock", cls=_Commands, no_args_is_help=True)
@click.option(
    "--dislock-url",
    multiple=True,
    metavar="URL",
    help="The lock server, in place of the app's setting dislock_url.",
)
@click.pass_context
def dislock(context: click.Context, dislock_url: tuple[str, ...]) -> None:
    """See and operate the locks of an app."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a key has any character, an encoding has not
            stream.reconfigure(errors="backslashreplace")
    apply_options(context.obj.app, dislock_url=dislock_url)


for _command in (ls, show, line, why, doctor, web, free, drop, put_back, pause, limit, resume, run):
    # Its first paragraph, whole: click cuts what it makes of the help by itself.
    _command.short_help = (_command.help or "").partition("\n\n")[0]
    dislock.add_command(_command)
