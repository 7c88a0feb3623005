"""``celery dislock drain``: send on what is parked on another lock server, or under another prefix.

After a change of ``dislock_url`` or ``dislock_prefix``, lines may be left where no worker looks any
more.  Each task is taken out of its line there, and its message is published with a turn for the
same key here.  It is a copy if its turn was on its way already: one of the two runs.
"""

from __future__ import annotations

import time
from collections import ChainMap
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from celery_dislock.config.options import RENEWALS_PER_TIMEOUT, TaskOptions
from celery_dislock.config.settings import app_settings
from celery_dislock.exceptions import DamagedLockError, SettingsError
from celery_dislock.keys.templates import key_of
from celery_dislock.messages.headers import STORE_HEADER, STORE_NAME, TICKET_HEADER
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
from celery_dislock.parking.process import ParkingProcess, runtime_of
from celery_dislock.parking.publisher import Publisher
from celery_dislock.parking.sweep import interval
from celery_dislock.scripts.names import claimed_in, moved_to
from celery_dislock.servers.overview import SEARCHED, Overview
from celery_dislock.servers.server import keys_pattern, scan
from celery_dislock.tasks.actions import BrokerError, message_in, publish
from celery_dislock.tasks.task import guards_of
from celery_dislock.words import for_people, plain

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from celery import Celery

    from celery_dislock.parking.store import Lines
    from celery_dislock.servers.replies import Turn
    from celery_dislock.servers.view import Holder, LockState, Waiter

LOOK_EVERY = 0.5  # seconds, for workers that sweep
SAME = "this is where the app's locks are"


class Sent(NamedTuple):
    """
    What became of one parked task.

    Attributes:
        lock: Name of the lock in Redis, there.
        ticket: Its ticket; empty: the lock is damaged, and its tasks were left there.
        problem: Why it was left there; empty: it was sent on.
    """

    lock: str
    ticket: str
    problem: str = ""


class _Quiet(Publisher):
    """Publishes no turns: those whom a line gives one are sent on like the others."""

    def hand_over(self, lines: Lines, turns: Sequence[Turn]) -> None:
        """Do nothing."""


class Drain:
    """
    Sends the parked tasks of one store on to that of the app.  Blocks for its round trips.

    Args:
        app: The app, with its settings of now.
        url: ``dislock_url`` there; None: as the app's.
        prefix: ``dislock_prefix`` there; None: as the app's.

    Raises:
        SettingsError: A URL cannot be used, or one of both servers keeps no lines.

    Attributes:
        here: The lock server of the app, for people.
        there: The other one, for people.
    """

    def __init__(self, app: Celery, url: str | None, prefix: str | None) -> None:
        self._app = app
        given = {"dislock_url": url, "dislock_prefix": prefix}
        runtime = runtime_of(app)
        conf = ChainMap({name: one for name, one in given.items() if one is not None}, app.conf)
        settings = app_settings(conf)
        self._prefix, self._old_prefix = runtime.settings.dislock_prefix, settings.dislock_prefix
        self._here = runtime.process
        self._there = ParkingProcess(conf, settings, _Quiet(app))
        self.here = f"{self._here.store.server}, prefix {self._prefix}"
        self.there = f"{self._there.store.server}, prefix {self._old_prefix}"
        if not (self._here.can_park and self._there.can_park):
            remedy = "several independent lock servers keep no parked tasks"
            raise SettingsError("drain", "dislock_url", self.there, remedy)
        self._overview = Overview(self._there.store.lock_server, self._old_prefix)

    def check(self) -> None:
        """
        Check that the other store is another one.

        Raises:
            SettingsError: It is where the app's locks are, or a copy of that.
            StoreError: A server did not answer.
        """
        if self._here.identity.confirm() == self._there.identity.confirm():
            raise SettingsError("drain", "dislock_url", self.there, SAME)

    @property
    def interval(self) -> float:
        """Seconds between two sweeps of a worker with the app's tasks."""
        every = interval([guard.options for guard in guards_of(self._app).values()])
        return every or TaskOptions.lock_watchdog_timeout / RENEWALS_PER_TIMEOUT

    def workers(self, seconds: float) -> Sequence[Holder]:
        """
        Look for workers that still use the other store; blocks for *seconds* if there is none.

        A worker with ``--dislock`` asks for the lock of the sweep once per interval.  One that is
        too busy for that may hold a lock.

        Raises:
            StoreError: The server did not answer.
        """
        until = time.monotonic() + seconds
        found = [one for lock in self.lines() for one in lock.holders if one.worker]
        found = [one for one in found if one.may_live]
        while not found:
            found += self._overview.lock(self._there.sweep_name, most=0).holders
            if time.monotonic() >= until:
                break
            time.sleep(LOOK_EVERY)
        return found

    def lines(self) -> Iterator[LockState]:
        """
        Yield the locks that have parked tasks there, with the first of them, but damaged ones.

        Raises:
            StoreError: The server did not answer.
        """
        for name in self._there.lines.names():
            with suppress(DamagedLockError):  # run() tells it
                lock = self._overview.lock(name, most=SEARCHED)
                if self._parked(lock):
                    yield lock

    def run(self) -> Iterator[Sent]:
        """
        Send on all that is parked there; then messages on their way from there belong here.

        A task is set aside there first, and forgotten when its message is published.

        Raises:
            BrokerError: The broker did not take a message.
            StoreError: A server did not answer.
        """
        for name in list(self._there.lines.names()):
            try:
                while places := self._parked(self._overview.lock(name, most=SEARCHED)):
                    for place in places:
                        yield from self._sent(name, place.ticket)
                self._tell_replaced(name)
            except DamagedLockError as exc:
                yield Sent(name, "", str(exc))
        for name in self._claimed():
            try:
                tickets = self._there.lines.claims(name)
                self._here.lines.claims(moved_to(self._prefix, name), tickets)
            except DamagedLockError as exc:
                yield Sent(name, "", str(exc))
        self._here.identity.take_over(self._there.identity.name(), drained=True)
        self._there.identity.rename()  # for a worker that is started there by mistake

    def close(self) -> None:
        """Close the connections to the other server."""
        self._there.close()

    def _parked(self, lock: LockState) -> list[Waiter]:
        """Return the parked tasks of the app's broker among the first of a line, in order."""
        ours = {None, self._there.store.home}
        return [one for one in (*lock.turns, *lock.line) if one.parked and one.broker in ours]

    def _sent(self, name: str, ticket: str) -> Iterator[Sent]:
        lines = self._there.lines
        lines.withdraw(name, ticket)
        kept = next((found for _, found in lines.aside(name, ticket)), b"")
        try:
            message = message_in(kept)
        except ValueError as exc:
            yield Sent(name, ticket, f"its message is lost: {exc}")
            return
        store = self._here.identity.name()
        notes = {TICKET_HEADER: [moved_to(self._prefix, name), ticket], STORE_HEADER: store}
        try:
            publish(self._app, message, notes)
        except BrokerError as exc:
            yield Sent(name, ticket, f"send it with `put-back` when that is mended: {exc}")
            raise
        lines.forget_aside(name, ticket)
        yield Sent(name, ticket)

    def _claimed(self) -> set[str]:
        """Find the locks there with claims: a copy of such a task may come, and must run."""
        names: set[str] = set()
        for send in self._there.store.lock_server.senders():
            for found in scan(send, keys_pattern(self._old_prefix, "*")):
                names.update(filter(None, map(claimed_in, found)))
        return names

    def _tell_replaced(self, name: str) -> None:
        """End the tasks that had lost their place in line there, if nobody has done so yet."""
        for lock, swept in self._there.lines.sweep([name]).items():
            if not isinstance(swept, Exception):
                self._there.tell_replaced(lock, swept.replaced)


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
    """Send on what is parked elsewhere: on another server or prefix.

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
