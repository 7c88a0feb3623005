"""
The lock server of a test: somebody else has a lock, a holder crashes, the server is away.

The fixture ``dislock_server`` of pytest is a :class:`DislockServer`.  Any other test runner opens
one with ``with``.  Nothing is faked but the server, which is fakeredis's and runs our own scripts,
and the clock, which :meth:`DislockServer.advance` moves.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from itertools import chain, count
from typing import TYPE_CHECKING, Any
from unittest import mock
from weakref import WeakSet

from celery import Task, states
from celery.canvas import Signature

from celery_dislock.clock import monotonic
from celery_dislock.config.settings import set_settings
from celery_dislock.config.urls import without_password
from celery_dislock.config.values import seconds
from celery_dislock.exceptions import SettingsError
from celery_dislock.locks.lease import GONE_WHEN_RENEWED, Attempt
from celery_dislock.locks.runtime import Process, Runtime
from celery_dislock.operating.cli.reading import lock_lines
from celery_dislock.operating.locks import rows
from celery_dislock.parking.process import runtime_of
from celery_dislock.parking.sweep import Sweep
from celery_dislock.plugin import Dislock
from celery_dislock.servers.overview import Overview
from celery_dislock.servers.records import Conflict, describe
from celery_dislock.tasks.task import lock_for, terms_said
from celery_dislock.testing.apps import begin_anew, database, for_celery, is_redis
from celery_dislock.testing.messages import WORKER, Messages, queues
from celery_dislock.testing.watchdogs import OPEN, DrivenWatchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from datetime import timedelta
    from typing import Protocol, TypeAlias

    from celery import Celery
    from celery.result import AsyncResult
    from typing_extensions import Self

    from celery_dislock.locks.lease import Lease
    from celery_dislock.servers.view import Holder, LockState
    from celery_dislock.tasks.handle import LockHandle

    Key: TypeAlias = str | Sequence[str] | Signature  # of a lock; a signature stands for its task's

    class Server(Protocol):
        """A server on which tests run."""

        @property
        def url(self) -> str:
            """Its first database."""

        @property
        def clock(self) -> Callable[[], float] | None:
            """Returns the UNIX time that :meth:`advance` moves; None: nothing moves it."""

        def advance(self, seconds: float) -> None:
            """Let time pass."""

        def outage(self) -> AbstractContextManager[None]:
            """Answer nobody while the block runs."""


BROKERS = ("CELERY_BROKER_URL", "CELERY_BROKER_READ_URL", "CELERY_BROKER_WRITE_URL")
MAY_PASS = seconds(at_least=0)  # check of a time that passes
STEP_LEAST = 0.001  # seconds by which time moves at least, if something is due
LEAKS_MOST = 10  # locks that the error at the end of a test names
DATABASES = 3  # for locks, messages and results
LINE_MOST = 10**9  # places in line, more than any has
# Seconds for a reply, and to connect: on a busy machine a server of tests is slow, and not away.
PATIENCE = {"socket_timeout": 30.0, "socket_connect_timeout": 30.0}
IN_THE_ENVIRONMENT = (*BROKERS, "CELERY_RESULT_BACKEND")  # wins over an app's settings


class DislockServer:
    """
    A lock server for one test.  Use it with ``with``, or as the fixture ``dislock_server``.

    It begins empty.  At the end all apps have their settings back, and a lock that is still held is
    an AssertionError.  Locks that are left to expire, and those of :meth:`crash_holder`, are not.

    Args:
        server: The server to use; None: one inside this process.
        test: Name of the test, for messages.

    Attributes:
        url: The server's URL, for worker processes too.
    """

    def __init__(self, server: Server | None = None, test: str = "this test") -> None:
        if server is None:
            from celery_dislock.servers.memory import memory_server  # noqa: PLC0415 -- an extra

            server, self._of_messages = memory_server(), memory_server("messages").url
        else:
            self._of_messages = server.url
        self._server = server
        self._is_ours = getattr(server, "is_for_tests", False)
        self._choose_databases()
        self._test = test
        self._apps: list[Celery] = []
        self._watchdogs: WeakSet[DrivenWatchdog] = WeakSet()
        self._crashed: list[Lease] = []
        self._messages = Messages(self._apps, self._moved)
        self._undo = ExitStack()

    def _choose_databases(self) -> None:
        """Choose databases that no other one uses, which may be open for a module or a session."""
        used = {server._first for server in OPEN if server._server is self._server}  # noqa: SLF001
        self._first: int = next(first for first in count(0, DATABASES) if first not in used)
        self.url = database(self._server.url, self._first)

    def __enter__(self) -> Self:
        self._choose_databases()
        with ExitStack() as undo:
            undo.enter_context(mock.patch.object(Process, "watchdog_type", DrivenWatchdog))
            OPEN.append(self)
            undo.callback(OPEN.remove, self)
            self._dislock = undo.enter_context(
                Dislock.from_url(self.url, transport_options=PATIENCE)
            )
            self._runtime = self._dislock.runtime
            self._begin_empty()
            undo.enter_context(self._messages)
            self._undo = undo.pop_all()
        return self

    def _begin_empty(self) -> None:
        if self._is_ours:
            self._send("FLUSHDB")
            return
        for url in self._databases():
            if keys := _ask(url, "DBSIZE"):
                first, last = self._first, self._first + DATABASES - 1
                remedy = (
                    f"it has {keys} keys, and tests empty its databases {first} to {last} at their "
                    "end: give a server that is empty"
                )
                raise SettingsError("DislockServer", "server", without_password(url), remedy)

    def __exit__(self, *failure: object) -> None:
        process = self._runtime.process
        overview = Overview(process.store.lock_server, process.settings.dislock_prefix)
        crashed = {lease.owner for lease in self._crashed}
        try:
            held = [
                f"lock {row.key!r} is still held by {holder.who}"
                for row in rows(overview)
                for holder in row.holders
                if holder.may_live and holder.owner not in crashed
            ]
            for url in [self.url] if self._is_ours else self._databases():
                _ask(url, "FLUSHDB")
        finally:
            for lease in self._crashed + self._renewed():
                self._crash(lease)
                lease.finished = True  # else this thread has it, and cannot wait in the next test
            self._undo.close()
        if len(held) > LEAKS_MOST:
            held[LEAKS_MOST:] = [f"{len(held) - LEAKS_MOST} more are"]
        if held and failure[0] is None:
            raise AssertionError(f"{self._test} has ended, and {'; '.join(held)}")

    def use(self, app: Celery) -> None:
        """
        Let an app use this server until the test ends: for its locks, and in place of a Redis.

        The broker and the result backend are this server, too, if they are a Redis or are not set;
        messages that wait there are purged.  All settings of the app that change after this call
        get their values back at the end.
        """
        conf = app.conf
        conf.get("broker_url")  # reads the settings, and replaces app.conf by them
        conf = app.conf
        before = dict(conf.changes)
        environment = {n: v for n, v in os.environ.items() if n not in IN_THE_ENVIRONMENT}
        given = conf.broker_write_url, conf.result_backend

        def restore() -> None:
            conf.changes.clear()
            conf.changes.update(before)
            begin_anew(app)

        self._undo.callback(restore)
        self._undo.enter_context(mock.patch.dict(os.environ, environment, clear=True))
        settings: dict[str, Any] = {
            "dislock_url": self.url,
            "dislock_prefix": self._runtime.settings.dislock_prefix,
            "dislock_transport_options": PATIENCE,
            "dislock_min_replicas": 0,
        }
        broker, backend = map(is_redis, given)
        if broker:
            names = ("broker_url", "broker_read_url", "broker_write_url")
            url = for_celery(database(self._of_messages, self._first + 1))
            settings |= {**dict.fromkeys(names, url), "broker_use_ssl": None}
        if backend:
            url = for_celery(database(self._of_messages, self._first + 2))
            settings |= {"result_backend": url, "redis_backend_use_ssl": None}
        set_settings(app, settings)
        begin_anew(app)
        if broker:
            with app.connection_for_write() as connection:
                app.amqp.TaskConsumer(connection, queues(app)).purge()
        self._apps.append(app)

    def off(self, app: Celery) -> None:
        """Let the tasks of an app run without their locks until the test ends."""
        if app not in self._apps:
            self.use(app)
        set_settings(app, {"dislock_enabled": False})

    @contextmanager
    def hold(
        self, key: Key, *, timeout: float | timedelta | None = None, **options: Any
    ) -> Iterator[Lease]:
        """
        Have a lock held by somebody else while the block runs.

        Args:
            key: The key, a list of keys, or a signature of the task that takes the lock.
            timeout: Seconds after which the lease ends if its holder crashes; None: 30.
            options: How it is held, as for ``Dislock.lock()``: ``mode="shared"``, ``limit=3``.

        Raises:
            AssertionError: The lock is taken.
            SettingsError: An option is unknown, or cannot be used.
        """
        lease = self._take(key, **{"watchdog_timeout": timeout, **options})
        try:
            yield lease
        finally:
            lease.release()

    def _take(self, key: Key, **options: Any) -> Lease:
        # As a process of an app that uses this server, if there is one: a release publishes turns.
        here = (runtime_of(app) for app in self._apps if app.conf.dislock_url == self.url)
        runtime = next(here, self._runtime)
        process = runtime.process
        asked = self._dislock.lock(self._handle(key).keys, **options)
        lock = runtime.lock(asked.keys, asked._options)  # noqa: SLF001 -- not this thread's
        holder = describe({"thread": "somebody else"}, process.host, process.pid, lock.timeout)
        answer = lock.try_acquire(Attempt(process.owner_name("somebody:"), holder))
        if isinstance(answer, Conflict):
            raise self._failed(key, "is taken already")
        return answer

    def crash_holder(self, key: Key, *, timeout: float | timedelta | None = None) -> None:
        """
        Have the holder of a lock die: nobody renews its lease or releases it any more.

        If nobody in this process holds the lock, somebody else takes it first.

        Args:
            key: See :meth:`hold`.
            timeout: Seconds after which the lease of that somebody ends; None: 30.

        Raises:
            AssertionError: Another process holds the lock: kill that one.
        """
        for lease in self._leases(key) or [self._take(key, watchdog_timeout=timeout)]:
            self._crashed.append(lease)
            self._crash(lease)

    def _crash(self, lease: Lease) -> None:
        for watchdog in self._watchdogs:
            watchdog.unwatch(lease)

    def lose(self, key: Key) -> None:
        """Lose a lock, as a failover or an eviction does.  Holders in this process are told."""
        for name in self._names(key):
            self._send("DEL", name)
        leases = self._leases(key)
        for watchdog in self._watchdogs:
            for lease in [lease for lease in watchdog if lease in leases]:
                watchdog.unwatch(lease)
                lease.lose(GONE_WHEN_RENEWED)
                watchdog.channel.lost(lease)

    @contextmanager
    def outage(self) -> Iterator[None]:
        """Have the server answer nobody while the block runs.  The data stay."""
        with self._server.outage():
            yield
        for app in self._apps:
            vars(app).pop("_dislock_sender", None)  # it leaves the server alone for some seconds
        for watchdog in self._watchdogs:
            watchdog.hurry()
        self.advance(0)

    def advance(self, seconds: float | timedelta) -> None:
        """
        Let time pass: for the lock server, all expiries, and the watchdogs of this process.

        Leases of this process are renewed as time passes.  To another process the time passes at
        once, as if it had been stopped meanwhile.  On a real server this sleeps, and under pytest a
        test that wants more than 5 s is skipped.

        Args:
            seconds: Seconds, >= 0.

        Raises:
            ValueError: *seconds* is negative, not finite, or no duration.
        """
        left = MAY_PASS(seconds)
        clock = self._server.clock
        if clock is None:
            self._server.advance(left)
            return
        known = [server._watchdogs for server in OPEN if server._server is self._server]  # noqa: SLF001
        watchdogs = list(chain(*known))
        until = clock() + left
        with ExitStack() as driving:
            for watchdog in watchdogs:
                driving.enter_context(watchdog.driven())
            while True:
                waits = [wait for watchdog in watchdogs if (wait := watchdog.tick()) is not None]
                left = until - clock()
                if left <= 0:
                    break
                self._server.advance(min(left, max(min(waits, default=left), STEP_LEAST)))

    def parked(self, key: Key) -> list[str]:
        """Return the ids of the tasks that are parked for a lock, in order."""
        line = self._handle(key).line(LINE_MOST)
        return [str(waiter.id) for waiter in line if waiter.parked]

    def run_parked(self) -> int:
        """
        Run the messages that wait, as a worker does, in this thread; return how many there were.

        These are the turns of parked tasks, and all others in the queues of the apps in use that
        are due.  Those that are put off are run after their time, which :meth:`advance` moves.

        Raises:
            AssertionError: Messages keep coming, as those of a task that always puts itself back.
        """
        for app in self._apps:  # what a worker does about holders that have died
            sweep = Sweep(runtime_of(app).process, WORKER, every=1.0)
            sweep.says = terms_said(app)
            sweep.step()
            sweep.end()
        return self._messages.run()

    def assert_locked(self, key: Key) -> None:
        """Fail unless somebody holds the lock."""
        if not all(self._holders(key)):
            raise self._failed(key, "is held by nobody")

    def assert_free(self, key: Key) -> None:
        """Fail if somebody holds the lock."""
        if any(self._holders(key)):
            raise self._failed(key, "is held")

    def assert_waiting(self, key: Key, n: int) -> None:
        """Fail unless *n* wait in line for the lock, parked tasks or others."""
        waiting = sum(lock.waiting for lock in self._states(key))
        if waiting != n:
            raise self._failed(key, f"has {waiting} in line, not {n}")

    def assert_skipped(self, result: AsyncResult) -> None:
        """Fail unless the task was skipped because its lock was held; ask only when it is ready."""
        if result.state != states.REVOKED or "is held by" not in str(result.result):
            raise AssertionError(f"{_told(result)}: it was not skipped")

    def assert_duplicate(self, result: AsyncResult) -> None:
        """Fail unless the message was not sent, because another of its key was there."""
        if not result.duplicate:
            raise AssertionError(f"{_told(result)}: it is no duplicate")

    def assert_same_key(self, *signatures: Signature) -> None:
        """Fail unless these tasks, with these arguments, take the same lock."""
        keys = [self._handle(signature).key for signature in signatures]
        if len(set(keys)) != 1:
            told = "\n".join(
                f"  {key}: {signature!r}" for key, signature in zip(keys, signatures, strict=True)
            )
            raise AssertionError(f"different keys:\n{told}")

    def _handle(self, key: Key) -> LockHandle:
        if isinstance(key, Task):
            remedy = "a task has a lock for each call: give a signature, as in export.s(7)"
            raise SettingsError("DislockServer", "key", key.name, remedy)
        if isinstance(key, Signature):
            key = lock_for(key.type, *key.args, **key.kwargs).keys
        return self._dislock.lock_of(key)

    def _names(self, key: Key) -> Sequence[str]:
        return self._runtime.lock_names(self._handle(key).keys)

    def _states(self, key: Key) -> list[LockState]:
        return self._handle(key).state()

    def _holders(self, key: Key) -> list[Sequence[Holder]]:
        return [lock.holders() for lock in self._handle(key)]  # a shared reservation is no lock

    def _leases(self, key: Key) -> list[Lease]:
        """Return the leases of the lock that this process renews."""
        names = set(self._names(key))
        return [lease for lease in self._renewed() if not names.isdisjoint(lease.lock.names)]

    def _renewed(self) -> list[Lease]:
        return [lease for watchdog in self._watchdogs for lease in watchdog]

    def _failed(self, key: Key, why: str) -> AssertionError:
        lines = [line for lock in self._states(key) for line in lock_lines(lock)]
        return AssertionError("\n".join([f"lock {self._handle(key).key!r} {why}:", *lines]))

    def _send(self, *command: str) -> None:
        self._runtime.process.store.lock_server.send(*command)

    def _databases(self) -> list[str]:
        """Return the URLs of all databases that tests write to."""
        return [database(self._server.url, self._first + nth) for nth in range(DATABASES)]

    def _moved(self) -> float:
        """Return the seconds by which time has been moved, and a constant."""
        clock = self._server.clock
        return 0.0 if clock is None else clock() - monotonic()


def _ask(url: str, command: str) -> Any:
    with Dislock.from_url(url, transport_options=PATIENCE) as dislock:
        return dislock.runtime.process.store.lock_server.send(command)


def _told(result: AsyncResult) -> str:
    return f"task {result.id} is {result.state}, {result.result!r}"


@contextmanager
def no_locks() -> Iterator[None]:
    """Let all tasks of this process run without their locks while the block runs."""
    with mock.patch.object(Runtime, "off", new=True):
        yield
