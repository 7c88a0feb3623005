"""An app with a lock server and a broker in this process, under a clock that the test drives.

The scripts are the package's, on bare Lua; see :mod:`tests.integration.lua_server`.  So is all of
the client, from the task to the request to the server.  Nothing waits and no thread is started:
whoever sleeps, or waits in line, lets time pass.
"""

import os
import time
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from functools import partial
from itertools import count
from operator import itemgetter
from unittest.mock import patch

from celery import Celery
from celery.backends import cache
from greenlet import getcurrent, greenlet
from kombu import Producer
from kombu.exceptions import OperationalError
from lupa.lua51 import LuaError
from redis.exceptions import ResponseError

from celery_dislock import Dislock
from celery_dislock.exceptions import DamagedLockError, StoreError, UnreachableError
from celery_dislock.locks.runtime import Process
from celery_dislock.locks.watchdog import Watchdog
from celery_dislock.messages.headers import HEADER, notes_in
from celery_dislock.parking.process import runtime_of
from celery_dislock.parking.sweep import Sweep
from celery_dislock.servers.connections import store_error
from celery_dislock.tasks.actions import Actions
from celery_dislock.tasks.sending import Sender
from celery_dislock.tasks.task import terms_said
from celery_dislock.testing.messages import Messages
from tests.declaring import declare
from tests.integration.lua_server import START, LuaServer
from tests.integration.parked import Line
from tests.unit.deliveries import arrived, deliver, noted

MICROSECOND = 1e-6  # what the clock counts in
KEY = "line"  # of the lock of tests.integration.parked
AT_LEAST = 0.001  # seconds by which time moves, if a watchdog has something to do
_numbers = count(1)


class LockServer(LuaServer):
    """
    The lock server of a test.

    Attributes:
        away: Answer nobody.
        mute: Do what is asked, and let no reply arrive.
        requests: How many there were, answered or not.
        frozen: Ids of processes whose watchdogs stand still.
    """

    name = "redis://driven"

    def __init__(self):
        self.away = self.mute = False
        self.requests = 0
        self.frozen = set()
        self._strikes = {}
        self._failing = {}
        self._watchdogs = []
        self._timers = []
        super().__init__()

    def clock(self):
        """Return the time of all clocks, in seconds."""
        return int(self._lua[b"now"]()) / 1_000_000

    def advance(self, seconds):
        """Let time pass; the watchdogs do what is due, and what :meth:`after` was given."""
        until = self.clock() + seconds
        while True:
            while self._timers and self._timers[0][0] <= self.clock():
                self._timers.pop(0)[1]()
            awake = [one for pid, one in self._watchdogs if pid not in self.frozen]
            due = [wait for one in awake if (wait := one.tick()) is not None]
            due += [when - self.clock() for when, _ in self._timers[:1]]
            left = until - self.clock()
            if left < MICROSECOND:
                return
            super().advance(min([left, *(max(wait, AT_LEAST) for wait in due)]))

    def after(self, seconds, call):
        """Call this when so much time has passed."""
        self._timers.append((self.clock() + seconds, call))
        self._timers.sort(key=itemgetter(0))

    def stall(self, seconds):
        """Let time pass while this process stands still."""
        super().advance(seconds)

    def strike(self, error, *, after=False, skip=0):
        """Raise an error at the next request but *skip*: before or after it is carried out."""
        self._strikes[self.requests + 1 + skip] = error, after

    def fail_once(self, script, *, done=False, skip=0):
        """Do not answer the next call of a script but *skip*; *done*: only its reply is lost."""
        error = StoreError(self.name, "no reply") if done else UnreachableError(self.name, "away")
        self._failing[script] = [*[None] * skip, (error, done)]

    def run(self, script, keys, *arguments):
        """Run a script."""
        return self._ask(partial(super().run, script, keys, *arguments), keys, script)

    def run_many(self, script, calls, *, within):
        """Run a script many times; a damaged lock is the answer to one of them."""
        replies = []
        for key, *arguments in calls:
            try:
                replies.append(LockServer.run(self, script, [str(key)], *arguments))
            except DamagedLockError as exc:
                replies.append(exc)
        return replies

    def send(self, *command):
        """Run a command."""
        return self._ask(partial(super().send, *command))

    def pop(self, key, seconds):
        """Wait for an element of a list."""
        popped = self.send("LPOP", key)
        if popped is None:
            self.advance(seconds)
            popped = self.send("LPOP", key)
        return popped

    def _ask(self, request, keys=(), script=None):
        self.requests += 1
        if self.away:
            raise UnreachableError(self.name, "away")
        failing = self._failing.get(script)
        strike = self._strikes.pop(self.requests, None) or (failing and failing.pop(0))
        error, after = strike or (None, False)
        if error is not None and not after:
            raise error
        try:
            reply = request()
        except LuaError as exc:
            raise store_error(self.name, ResponseError(str(exc)), keys) from None
        if error is not None:
            raise error
        if self.mute:
            raise StoreError(self.name, "no reply")
        return reply

    def drive(self, monkeypatch):
        """Be the lock server of all URLs, and have the time of all clocks."""

        def watchdog(store, **options):
            made = Watchdog(store, **{**options, "clock": self.clock, "threaded": False})
            self._watchdogs.append((os.getpid(), made))
            return made

        sender = partial(Sender, clock=self.clock, pause=self.advance)
        monkeypatch.setattr(Process, "watchdog_type", staticmethod(watchdog))
        monkeypatch.setattr("celery_dislock.servers.store.server_for", lambda *_, **__: self)
        actions = partial(Actions, clock=self.clock, pause=self.advance)
        monkeypatch.setattr("celery_dislock.tasks.sending.Sender", sender)
        monkeypatch.setattr("celery_dislock.tasks.handle.Actions", actions)
        monkeypatch.setattr(time, "time", self.clock)
        monkeypatch.setattr(time, "monotonic", self.clock)
        monkeypatch.setattr(time, "sleep", self.advance)

    def locks(self):
        """Return the keys of the locks that somebody has."""
        return sorted(name.partition(":{")[2][:-1] for name in self.contents() if name[-1] == "}")


def reservation(task, *args):
    """Return the reservation of the task's key, or of its keys; None if they are free."""
    return next((one.reservation for one in task.lock_for(*args).state() if one.reservation), None)


class Sent:
    """
    A message that was published.

    Attributes:
        headers: Its headers.
        body: Its body.
        options: What else its producer was given.
        locks: The keys of the locks that somebody had at that time.
    """

    def __init__(self, body, headers, locks, options):
        self.headers, self.body, self.locks, self.options = headers, body, locks, options
        self.id, self.notes = headers.get("id"), notes_in(headers)

    @property
    def delay(self):
        """Seconds until it is due."""
        eta = self.headers.get("eta")
        if eta is None:
            return 0.0
        return (datetime.fromisoformat(eta) - datetime.now(timezone.utc)).total_seconds()


class Broker:
    """
    What is published in this process.

    Attributes:
        times_away: How often it takes no message yet.
        sent: The messages, in order.
    """

    def __init__(self, lock_server, monkeypatch):
        self.times_away = 0
        self.sent = []
        self._locks = lock_server.locks
        monkeypatch.setattr(
            Producer, "publish", lambda _, *args, **options: self.take(*args, **options)
        )

    def take(self, body, *, headers, **options):
        """Take a message."""
        if self.times_away:
            self.times_away -= 1
            raise OperationalError
        self.sent.append(Sent(body, headers, self._locks(), options))

    @property
    def last(self):
        """The last message."""
        return self.sent[-1]

    @property
    def ids(self):
        """The ids of the messages."""
        return [one.id for one in self.sent]


class Child:
    """
    A pool process in which a task runs until :meth:`go_on`.

    Attributes:
        request: What the main process knows of it.
    """

    pid = os.getpid() + 1

    def __init__(self, app, headers=None, task_id="1", **options):
        task = declare(app, _wait, **options)
        self._worker = greenlet(partial(deliver, task, task_id, headers=headers))
        self.request = arrived(task, task_id, **(headers or {}))
        self.request.worker_pid = self.pid
        self.go_on()

    def go_on(self):
        """Let the task go on, unless it has ended."""
        with patch.object(os, "getpid", lambda: self.pid):
            if not self._worker.dead:
                self._worker.switch()


def _wait():
    getcurrent().parent.switch()


def new_app(name="shop"):
    """Make an app whose broker and results are in this process."""
    app = Celery(name, broker="memory://here", backend="cache+memory://", set_as_current=False)
    cache._DUMMY_CLIENT_CACHE.clear()  # else results outlive their app
    app.conf.dislock_url = LockServer.name
    return app


@contextmanager
def held(app, key="k", task_id="1", body=lambda: None, **options):
    """Let a worker run a task that holds the lock while the block runs, and then *body*."""

    def stays():
        getcurrent().parent.switch()
        return body()

    task = declare(app, stays, name=f"shop.holder{next(_numbers)}", lock_key=key, **options)
    worker = greenlet(partial(deliver, task, task_id))
    ended = worker.switch()
    assert not worker.dead, ended
    try:
        yield task
    finally:
        worker.switch()


class Shop:
    """
    An app with one lock server, whose processes are all this one.

    Args:
        url: Of a lock server to use instead of one in this process.
        conf: Settings of the app.

    Attributes:
        app: The app; its tasks are those that :meth:`declare` makes.
        server: The lock server.
        ran: The ids of the tasks whose bodies began, in order.
    """

    def __init__(self, url="", **conf):
        self.server = LockServer()
        self._url = url
        self._conf = conf
        self.ran = []
        self._undo = ExitStack()

    def __enter__(self):
        if not self._url:
            serve = patch("celery_dislock.servers.store.server_for", lambda *_, **__: self.server)
            self._undo.enter_context(serve)
        unthreaded = partial(Watchdog, threaded=False)
        self._undo.enter_context(patch.object(Process, "watchdog_type", staticmethod(unthreaded)))
        self.app = new_app()
        queue = f"shop-{next(_numbers)}"
        url = self._url or LockServer.name
        self.app.conf.update({"dislock_url": url, "task_default_queue": queue, **self._conf})
        self.dislock = Dislock(self.app)
        self.messages = Messages([self.app], lambda: self.clock() - START)
        self._undo.enter_context(self.messages)
        self._undo.callback(self.dislock.close)
        return self

    def __exit__(self, *_failure):
        self._undo.close()

    def declare(
        self, body=lambda *_: None, lock_on_conflict="queue", name="shop.export", **options
    ):
        """
        Declare a task that may be parked; a second one of its name takes its place.

        Args:
            body: Called with the task.
            lock_on_conflict: The strategy.
            name: The task's name.
            options: More options of the task.
        """
        self.app.tasks.pop(name, None)

        def export(self, *args):
            ran.append(self.request.id)
            return body(self, *args)

        ran = self.ran
        options = {"lock_key": KEY, "lock_on_conflict": lock_on_conflict, **options}
        declare(self.app, export, name=name, **options)
        self.app.finalize()
        return self.app.tasks[name]

    def send(self, task, task_id, *args, notes=None, **options):
        """Send a task of this id; *notes* are added to our header."""
        headers = {**options.pop("headers", {})}
        headers |= {} if notes is None else noted(**notes)
        return task.apply_async(args, task_id=task_id, headers=headers, **options)

    def work(self, *, later=0.0):
        """Run the messages that are due, or some seconds later; return how many there were."""
        self.server.advance(later)
        return self.messages.run()

    def run(self, task, task_id="2", *args, **options):
        """Send a task and run all messages; return its result."""
        result = self.send(task, task_id, *args, **options)
        self.work()
        return result

    def park(self, task, *task_ids):
        """Park tasks, "2" if no other is named, and give the first its turn; return its result."""
        with self.held():
            results = [self.run(task, one) for one in task_ids or ("2",)]
        return results[0]

    @contextmanager
    def held(self, key=KEY, **options):
        """Have a lock held by a program of this app for an hour; its release gives the turns."""
        with self.dislock.lock(key, watchdog_timeout=3600, **options) as lease:
            yield lease

    @property
    def other(self):
        """Another process, which publishes nothing, and what it sees of the line."""
        return Line(self.server, self.broker)

    @property
    def line(self):
        """The ids of the tasks in line."""
        return self.other.line()

    @property
    def broker(self):
        """The name of the app's broker on the lock server."""
        return runtime_of(self.app).process.store.broker

    @property
    def queue(self):
        """The messages that nobody has taken, as the broker keeps them."""
        with self.app.connection_for_read() as connection:
            return connection.default_channel._queue_for(self.app.conf.task_default_queue).queue

    @property
    def sent(self):
        """The notes of the messages that nobody has taken, in order."""
        return [message["headers"].get(HEADER, {}) for message in self.queue]

    @property
    def put_off(self):
        """The messages that a worker holds until they are due."""
        return self.messages._waiting

    def sweeper(self, worker="w1@here", **options):
        """Return the sweep of one worker."""
        sweep = Sweep(runtime_of(self.app).new_process(), worker, 10.0, **options)
        sweep.says = terms_said(self.app)
        return sweep

    def clock(self):
        """Return the seconds of the lock server's clock."""
        return self.server.now_ms / 1000

    def sweep(self):
        """Let a worker look through the lines once."""
        sweep = self.sweeper()
        sweep.step()
        sweep.end()
