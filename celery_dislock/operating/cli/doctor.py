"""``celery dislock doctor``: examine the lock server, the workers and the locks themselves.

The facts are gathered first.  Then the checks of :mod:`celery_dislock.operating.checks` judge them.
Nothing is changed but keys of doctor's own, which are gone again, and no command is sent that
blocks the server.  If the lock server is away, what the workers say is judged nevertheless.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import click

from celery_dislock.exceptions import StoreError
from celery_dislock.messages.broker import answer_within
from celery_dislock.operating.checks import locks, server, workers
from celery_dislock.operating.checks.facts import Facts, Fleet, understood
from celery_dislock.operating.checks.table import LEVELS, NOTE, SERIOUS, Finding
from celery_dislock.operating.cli.session import AWAY, FOUND, as_json, session, within, write_json
from celery_dislock.operating.cli.table import wrapped
from celery_dislock.operating.locks import as_data
from celery_dislock.operating.site import ANSWERS_WITHIN, patient
from celery_dislock.redaction import reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from celery import Celery

    from celery_dislock.operating.checks.facts import Description

BLOCKS_WITHIN = 0.3  # seconds for RabbitMQ to say that it takes no messages
COLORS = {"serious": "red", "warning": "yellow", "note": "cyan", "ok": "green"}


@click.command()
@as_json
@within(help="How long to wait for the workers' answers.")
@click.pass_context
def doctor(context: click.Context, json_: bool, timeout: float) -> None:  # noqa: FBT001 -- click's
    """Examine the lock server, the workers and the locks.

    Each finding says what is wrong, how serious it is, and what to do.  Exit code 1: a finding is
    serious.  3: the lock server is away.
    """
    with session(context) as opened:
        facts = Facts(opened, ask_fleet(opened.app, timeout))
        found = examine(facts)
        counts = {level: sum(finding.level == level for finding in found) for level in LEVELS}
        if json_:
            verdict = {"away": facts.away, "serious": counts[SERIOUS] > 0, "counts": counts}
            write_json({**verdict, "findings": as_data(found)})
        else:
            _write(found, counts)
        if facts.away:
            context.exit(AWAY)
        if counts[SERIOUS]:
            context.exit(FOUND)


def examine(facts: Facts) -> list[Finding]:
    """
    Examine everything; return the findings, the most serious first.

    Blocks for the round trips of all checks.

    Args:
        facts: What is known before the locks are looked at.
    """
    checks, found = [*workers.CHECKS, *server.CHECKS], []
    if not facts.away:
        try:
            facts.look()
            checks += locks.CHECKS
        except StoreError as exc:
            found.append(Finding("locks", NOTE, f"The locks could not be looked at: {exc}"))
    for name, finds in checks:
        found += findings(name, finds, facts)
    return sorted(found, key=lambda finding: LEVELS.index(finding.level))


def findings(
    check: str, finds: Callable[[Facts], Iterable[Finding]], facts: Facts
) -> Iterator[Finding]:
    """Yield what a function finds; what it cannot look at, or judge, is a note."""
    try:
        for finding in finds(facts):
            yield finding._replace(check=finding.check or check)
    except Exception as exc:  # noqa: BLE001 -- of the lock server, or an answer of any program
        yield Finding(check, NOTE, f"This could not be looked at: {reason_of(exc)}")


def ask_fleet(app: Celery, timeout: float) -> Fleet:
    """
    Ask which workers there are, and what they tell of their locks.  Never raises.

    Args:
        app: The app.
        timeout: Seconds to wait for their answers; blocks for the broker, too.
    """
    # The connections of Celery's pool, which it publishes with, have these options, too.
    app.conf.broker_transport_options = patient(app, max(ANSWERS_WITHIN, 2 * timeout))
    blocked: list[str] = []
    try:
        ask = partial(_ask, app, timeout, blocked)
        answers = answer_within(2 * ANSWERS_WITHIN + 2 * timeout, ask)
    except Exception as exc:  # noqa: BLE001 -- of any broker
        return Fleet({}, next(iter(blocked), "") or reason_of(exc))
    return Fleet(answers)


def _ask(app: Celery, timeout: float, blocked: list[str]) -> dict[str, Description | None]:
    with app.connection_for_write() as connection:
        connection.ensure_connection(max_retries=1, interval_start=0, timeout=ANSWERS_WITHIN)
        connection.default_channel  # noqa: B018 -- Redis connects here
    if app.connection_for_write().transport.driver_name == "py-amqp":
        _try_to_send(app, blocked)
    names = sorted(_replies(app, "ping", timeout=timeout))
    # Those that have answered are asked by name, so that the last answer ends the wait.
    known = {"destination": names, "limit": len(names), "timeout": timeout}
    answers = _replies(app, "dislock", **known) if names else {}
    return {name: understood(answers.get(name)) for name in names}


def _try_to_send(app: Celery, blocked: list[str]) -> None:
    """Send RabbitMQ a message to no queue: if it takes no messages, it says why."""
    options = {**app.conf.broker_transport_options, "on_blocked": blocked.append}
    connection = app.connection_for_write(transport_options=options)
    connection.Producer().publish("", exchange="", routing_key=f"dislock.{uuid4()}")
    with suppress(TimeoutError):
        connection.drain_events(timeout=BLOCKS_WITHIN)
    if blocked:
        connection.collect()  # it would not answer a close
        raise ConnectionError(blocked[0])
    connection.release()


def _replies(app: Celery, command: str, **how: Any) -> dict[str, Any]:
    replies = app.control.broadcast(command, reply=True, **how)
    return {name: answer for reply in replies or () for name, answer in reply.items()}


def _write(found: Iterable[Finding], counts: Mapping[str, int]) -> None:
    indent = " " * 9
    for finding in found:
        level = click.style(
            finding.level.ljust(7), fg=COLORS[finding.level], bold=finding.level != "ok"
        )
        what = wrapped(f"{finding.check}: {finding.what}", indent, indent)
        click.echo(f"{level}  {what.lstrip()}")
        if finding.remedy:
            click.echo(wrapped(finding.remedy, f"{indent}-> ", f"{indent}   "))
    click.echo(", ".join(f"{many} {level}" for level, many in counts.items() if many))
