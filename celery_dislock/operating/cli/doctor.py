"""``celery dislock doctor``: examine the lock server, the workers and the locks."""

from __future__ import annotations

import shutil
import textwrap
from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from celery_dislock.operating.about import about
from celery_dislock.operating.checks.facts import Facts, Fleet, understood
from celery_dislock.operating.cli.session import (
    AWAY,
    FOUND,
    as_json,
    is_terminal,
    session,
    write_json,
)
from celery_dislock.operating.doctor import examine
from celery_dislock.operating.findings import LEVELS
from celery_dislock.redaction import reason_of
from celery_dislock.tasks.task import guards_of
from celery_dislock.words import plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from celery import Celery

    from celery_dislock.operating.cli.session import Session
    from celery_dislock.operating.doctor import Report

WIDTH = 100  # columns of the text, if a terminal has them
COLORS = {"serious": "red", "warning": "yellow", "note": "cyan", "ok": "green"}
ANSWERS_WITHIN = 4.0  # seconds for the broker, which may be slower than a lock server


@click.command()
@as_json
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for the workers' answers.",
)
@click.pass_context
def doctor(context: click.Context, json_: bool, timeout: float) -> None:  # noqa: FBT001 -- click's
    """Examine the lock server, the workers and the locks.

    Each finding says what is wrong, how serious it is, and what to do.  Exit code 1: a finding is
    serious.  3: the lock server is away.
    """
    with session(context) as opened:
        process, settings = opened.process, opened.runtime.settings
        workers = Workers(opened.app, timeout)
        facts = Facts(
            process.store.lock_server,
            settings.dislock_prefix,
            process.store.home,
            settings.dislock_min_replicas,
            ours=_ours(opened),
            fleet=workers.fleet(),
            workers=workers,
        )
        report = examine(facts)
        if json_:
            write_json(as_dict(report))
        else:
            _write(report)
        if report.away:
            context.exit(AWAY)
        if report.serious:
            context.exit(FOUND)


def _ours(opened: Session) -> dict[str, Any]:
    options = {name: guard.options for name, guard in guards_of(opened.app).items()}
    return about(opened.runtime, options)


class Workers:
    """
    Asks an app's workers.  Each method blocks for *timeout* at most, and never raises.

    Args:
        app: The app.
        timeout: Seconds to wait for answers.
    """

    def __init__(self, app: Celery, timeout: float) -> None:
        self._app = app
        self._timeout = timeout
        self._names: list[str] = []
        self._give_up()

    def _give_up(self) -> None:
        """Have this process give up a Redis broker that does not answer; kombu waits for ever."""
        conf = self._app.conf
        if self._app.connection_for_write().transport.driver_type == "redis":
            within = max(ANSWERS_WITHIN, 2 * self._timeout)
            given = {"socket_timeout": within, "socket_connect_timeout": ANSWERS_WITHIN}
            conf.broker_transport_options = {**given, **(conf.broker_transport_options or {})}

    def fleet(self) -> Fleet:
        """Ask which workers there are, what they tell of their locks, and their queues."""
        try:
            with self._app.connection_for_write() as connection:
                connection.ensure_connection(
                    max_retries=1, interval_start=0, timeout=ANSWERS_WITHIN
                )
                connection.default_channel  # noqa: B018 -- Redis connects here
            pinged = self._replies("ping", {"timeout": self._timeout})
            self._names = sorted({name for name, _ in pinged})
            answers = self._ask("dislock")
            queues = self._ask("active_queues")
        except Exception as exc:  # noqa: BLE001 -- of any broker
            return Fleet({}, {}, reason_of(exc))
        many = Counter(name for name, _ in pinged)
        return Fleet(
            {name: understood(answers.get(name)) for name in self._names},
            {name: one for name, one in queues.items() if isinstance(one, list)},
            twice=[name for name, times in many.items() if times > 1],
        )

    def _ask(self, command: str, **arguments: Any) -> Mapping[str, Any]:
        """Ask those that have answered the ping; ends with the last answer."""
        if not self._names:
            return {}
        limits = {"destination": self._names, "limit": len(self._names), "timeout": self._timeout}
        return dict(self._replies(command, limits, **arguments))

    def _replies(
        self, command: str, limits: Mapping[str, Any], **arguments: Any
    ) -> list[tuple[str, Any]]:
        replies: Iterable[Mapping[str, Any]] | None = self._app.control.broadcast(
            command, arguments=arguments, reply=True, **limits
        )
        return [one for reply in replies or () for one in reply.items()]

    def known(self, ids: Sequence[str]) -> set[str]:
        """Return those of the task ids that a worker has: received, with an ETA, or running."""
        try:
            replies = self._ask("query_task", ids=list(ids))
        except Exception:  # noqa: BLE001 -- of any broker
            return set(ids)  # perhaps: nothing is said of them
        return {one for ids in replies.values() if isinstance(ids, dict) for one in ids}

    def empty(self) -> bool | None:
        """Return whether the queues that are known are empty; None if the broker does not say."""
        try:
            with self._app.connection_for_write() as connection:
                channel = connection.default_channel
                names = {
                    queue["name"]
                    for queues in self._ask("active_queues").values()
                    for queue in queues
                } | {str(name) for name in self._app.amqp.queues}
                return not any(
                    channel.queue_declare(queue=name, passive=True).message_count for name in names
                )
        except Exception:  # noqa: BLE001 -- of any broker; a queue may not exist
            return None


def as_dict(report: Report) -> dict[str, Any]:
    """Return an examination as JSON has it."""
    findings = [one._asdict() for one in report.findings]
    counts = {level: sum(one["level"] == level for one in findings) for level in LEVELS}
    return {
        "away": report.away,
        "serious": report.serious,
        "counts": counts,
        "findings": findings,
    }


def _write(report: Report) -> None:
    indent = " " * 9
    for one in report.findings:
        level = click.style(one.level.ljust(7), fg=COLORS[one.level], bold=one.level != "ok")
        what = _wrapped(f"{one.check}: {one.what}", indent)
        click.echo(f"{level}  {what}")
        if one.remedy:
            click.echo(f"{indent}-> {_wrapped(one.remedy, indent + '   ')}")
    counts = [(level, sum(f.level == level for f in report.findings)) for level in LEVELS]
    click.echo(", ".join(f"{many} {level}" for level, many in counts if many))


def _width() -> int:
    return min(WIDTH, shutil.get_terminal_size().columns) if is_terminal() else WIDTH


def _wrapped(text: str, indent: str) -> str:
    lines = textwrap.wrap(
        plain(text), _width() - len(indent), break_long_words=False, break_on_hyphens=False
    )
    return f"\n{indent}".join(lines)
