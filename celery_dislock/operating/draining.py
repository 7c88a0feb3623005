"""Send tasks on that are parked on a lock server, or under a prefix, that the app does not use now.

After a change of ``dislock_url`` or ``dislock_prefix``, lines may be left where no worker looks any
more.  Each task is taken out of its line there, and its message is published with a turn for the
same key here.  It is a copy if its turn was on its way already: one of the two runs.
"""

from __future__ import annotations

import time
from collections import ChainMap
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from celery_dislock.config.options import RENEWALS_PER_TIMEOUT, TaskOptions
from celery_dislock.config.settings import app_settings
from celery_dislock.exceptions import DamagedLockError, SettingsError
from celery_dislock.messages.headers import STORE_HEADER, TICKET_HEADER
from celery_dislock.parking.process import ParkingProcess, runtime_of
from celery_dislock.parking.publisher import Publisher
from celery_dislock.parking.sweep import interval
from celery_dislock.scripts.names import claimed_in, moved_to
from celery_dislock.servers.overview import SEARCHED, Overview
from celery_dislock.servers.server import keys_pattern, scan
from celery_dislock.tasks.actions import BrokerError, message_in, publish
from celery_dislock.tasks.task import guards_of

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
