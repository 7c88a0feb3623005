"""``celery dislock why``: why a task does not run, in one sentence."""

from __future__ import annotations

from dataclasses import asdict

import click

from celery_dislock.keys.templates import check_written
from celery_dislock.operating.cli.session import AWAY, FOUND, as_json, session, within, write_json
from celery_dislock.operating.cli.table import wrapped
from celery_dislock.operating.why import why as ask


@click.command()
@click.argument("task_id", metavar="TASK_ID")
@click.option("--key", multiple=True, metavar="KEY", help="Look at the lock of this key only.")
@within(help="How long to wait for the workers' answers, if they are asked.")
@as_json
@click.pass_context
def why(
    context: click.Context,
    task_id: str,
    key: tuple[str, ...],
    timeout: float,
    json_: bool,  # noqa: FBT001 -- click's flag
) -> None:
    """Say why a task does not run, or that it does.

    One sentence, what it rests on, and what makes the task run. The result backend is asked, the
    lock server, and then the workers. What is not known is said.

    Exit code 1 if nothing is known of the task. 3: the lock server did not answer.
    """
    with session(context) as opened:
        keys = [check_written(name) for name in key]
        answer = ask(opened.app, task_id, keys=keys, timeout=timeout, runtime=opened.runtime)
        if json_:
            write_json(asdict(answer))
        else:
            click.echo(wrapped(answer.sentence))
            for fact in answer.rests_on:
                click.echo(wrapped(fact, "  - ", "    "))
            if answer.remedy:
                click.echo(wrapped(answer.remedy, "-> ", "   "))
        if answer.away:
            context.exit(AWAY)
        if answer.state == "not known":
            context.exit(FOUND)
