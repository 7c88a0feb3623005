"""An app, its workers and its lock server in this process: the real scripts, and driven time.

Messages go through kombu's broker in memory, and a worker's own request class runs them.  Nothing
runs until a test says so.
"""

from __future__ import annotations

import itertools
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from celery import Celery
from celery.backends import cache
from lupa.lua51 import LuaError
from redis.exceptions import ResponseError

from celery_dislock import Dislock, SingletonTask, StoreError
from celery_dislock.exceptions import UnreachableError
from celery_dislock.locks.runtime import Process
from celery_dislock.locks.watchdog import Watchdog
from celery_dislock.messages.headers import HEADER
from celery_dislock.parking.process import runtime_of
from celery_dislock.parking.sweep import Sweep
from celery_dislock.servers import store as store_module
from celery_dislock.servers.connections import store_error
from celery_dislock.testing.messages import Messages
from tests.integration.lua_server import START, LuaServer
from tests.integration.parked import Line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Self

    from celery_dislock.parking.identity import StoreIdentity
    from celery_dislock.scripts import Script

KEY = "line"  # of the lock of tests.integration.parked
_numbers = itertools.count(1)


class Server(LuaServer):
    """
    A lock server that can be away, and fails as one.

    Attributes:
        away: Answers nobody.
    """

    name = "redis://nowhere"

    def __init__(self) -> None:
        super().__init__()
        self.away = False
        self._fails: tuple[Script, bool] | None = None

    def fail_once(self, script: Script, *, done: bool = False) -> None:
        """Do not answer the next call of a script; *done*: only its reply is lost."""
        self._fails = script, done

    def run(self, script: Script, keys: Any, *arguments: Any) -> Any:
        """Run a script, if anybody answers."""
        failed, done = self._fails or (None, False)
        fails = failed is script
        if self.away or (fails and not done):
            self._fails = None if fails else self._fails
            raise UnreachableError(self.name, "away")
        try:
            reply = super().run(script, keys, *arguments)
        except LuaError as exc:
            raise store_error(self.name, ResponseError(str(exc)), keys) from None
        if fails:
            self._fails = None
            raise StoreError(self.name, "the reply was lost")
        return reply

    def run_many(self, script: Script, calls: Any, *, within: float) -> list[Any]:
        """Run a script many times; an error is the answer to one of them."""
        replies: list[Any] = []
        for key, *arguments in calls:
            try:
                replies.append(self.run(script, [str(key)], *arguments))
            except StoreError as exc:
                replies.append(exc)
        return replies


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

    def __init__(self, url: str = "", **conf: Any) -> None:
        self.server = Server()
        self._url = url
        self.conf = conf
        self.ran: list[str] = []
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        if not self._url:
            serve = mock.patch.object(store_module, "server_for", return_value=self.server)
            self._undo.enter_context(serve)
        unthreaded = partial(Watchdog, threaded=False)
        self._undo.enter_context(mock.patch.object(Process, "watchdog_type", unthreaded))
        cache._DUMMY_CLIENT_CACHE.clear()  # else results outlive their app
        self.app = Celery(
            "shop", broker="memory://", backend="cache+memory://", set_as_current=False
        )
        self.app.conf.update(
            {
                "dislock_url": self._url or Server.name,
                "task_default_queue": f"shop-{next(_numbers)}",
                **self.conf,
            }
        )
        self.dislock = Dislock(self.app)
        self.messages = Messages([self.app], lambda: self.server.now_ms / 1000 - START)
        self._undo.enter_context(self.messages)
        return self

    def __exit__(self, *_failure: object) -> None:
        self._undo.close()

    def declare(
        self,
        body: Callable[..., object] = lambda *_: None,
        lock_on_conflict: Any = "queue",
        name: str = "shop.export",
        **options: Any,
    ) -> Any:
        """
        Declare a task that may be parked; a second one of its name takes its place.

        Args:
            body: Called with the task.
            lock_on_conflict: The strategy.
            name: The task's name.
            options: More options of the task.
        """
        options = {"base": SingletonTask, "lock_key": KEY, **options}
        self.app.tasks.pop(name, None)

        @self.app.task(
            name=name, bind=True, shared=False, lock_on_conflict=lock_on_conflict, **options
        )
        def export(task: Any, *args: Any) -> object:
            self.ran.append(task.request.id)
            return body(task, *args)

        self.app.finalize()
        return self.app.tasks[name]

    def send(self, task: Any, task_id: str, *args: Any, notes: Any = None, **options: Any) -> Any:
        """Send a task of this id; *notes* are added to our header."""
        headers = {**options.pop("headers", {})}
        if notes is not None:
            headers[HEADER] = {"v": 1, **notes}
        return task.apply_async(args, task_id=task_id, headers=headers, **options)

    def work(self, *, later: float = 0.0) -> int:
        """Run the messages that are due, or some seconds later; return how many there were."""
        self.server.advance(later)
        return self.messages.run()

    def run(self, task: Any, task_id: str = "2", *args: Any, **options: Any) -> Any:
        """Send a task and run all messages; return its result."""
        result = self.send(task, task_id, *args, **options)
        self.work()
        return result

    @contextmanager
    def held(self, key: str = KEY, **options: Any) -> Iterator[Any]:
        """Have a lock held by a program of this app for an hour; its release gives the turns."""
        with self.dislock.lock(key, watchdog_timeout=3600, **options) as lease:
            yield lease

    @property
    def other(self) -> Line:
        """Another process, which publishes nothing, and what it sees of the line."""
        return Line(self.server, self.home)

    @property
    def line(self) -> list[str]:
        """The ids of the tasks in line."""
        return self.other.line()

    @property
    def home(self) -> str:
        """The name of the app's broker on the lock server."""
        return runtime_of(self.app).process.store.home

    @property
    def queue(self) -> Any:
        """The messages that nobody has taken, as the broker keeps them."""
        with self.app.connection_for_read() as connection:
            return connection.default_channel._queue_for(self.app.conf.task_default_queue).queue

    @property
    def sent(self) -> list[dict[str, Any]]:
        """The notes of the messages that nobody has taken, in order."""
        return [message["headers"].get(HEADER, {}) for message in self.queue]

    @property
    def put_off(self) -> list[Any]:
        """The messages that a worker holds until they are due."""
        return self.messages._waiting

    def wall(self) -> float:
        """Return the UNIX time by which messages are due."""
        return time.time() + self.clock() - START

    @property
    def identity(self) -> StoreIdentity:
        """The name of the store, as this process knows it."""
        return runtime_of(self.app).process.identity

    def new_identity(self) -> StoreIdentity:
        """The same, of another process."""
        return runtime_of(self.app).new_process().identity

    def deliver_again(self) -> None:
        """Let the broker say that it has delivered the last message before."""
        self.queue[-1]["properties"]["delivery_info"]["redelivered"] = True

    def sweeper(self, worker: str = "w1@here", **options: Any) -> Sweep:
        """Return the sweep of one worker."""
        process = runtime_of(self.app).new_process()
        return Sweep(process, process.sweep_name, worker, 10.0, **options)

    def worker(self) -> Any:
        """Return what a bootstep knows of a worker."""
        consumer = SimpleNamespace(event_dispatcher=None)
        return SimpleNamespace(
            app=self.app, hostname="w1@here", consumer=consumer, timer=None, steps=[]
        )

    def clock(self) -> float:
        """Return the seconds of the lock server's clock."""
        return self.server.now_ms / 1000

    def sweep(self) -> None:
        """Let a worker look through the lines once."""
        sweep = self.sweeper()
        sweep.step()
        sweep.end()
