"""An app, its workers and its lock server in this process: the real scripts, and driven time.

Messages go through kombu's broker in memory, and a worker's own request class runs them.  Nothing
runs until a test says so.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from celery import Celery
from celery.backends import cache
from kombu import Producer
from kombu.transport.memory import Channel

from celery_dislock import Dislock, SingletonTask, StoreError
from celery_dislock.locks.runtime import Process
from celery_dislock.locks.watchdog import Watchdog
from celery_dislock.messages.headers import HEADER
from celery_dislock.parking.process import runtime_of
from celery_dislock.parking.sweep import Sweep
from celery_dislock.servers import store as store_module
from celery_dislock.testing.messages import Messages
from celery_dislock.worker.steps import SweepStep
from tests.integration.lua_server import START, LuaServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Self

_numbers = itertools.count(1)


class Server(LuaServer):
    """
    A lock server that can be away.

    Attributes:
        away: Answers nobody.
        before: Called with the text of each script before it runs; may raise.
        after: The same, after it has run: what it raises loses the reply.
    """

    def __init__(self) -> None:
        super().__init__()
        self.away = False
        self.before: Callable[[str], object] = bool
        self.after: Callable[[str], object] = bool

    def run(self, script: Any, keys: Any, *arguments: Any) -> Any:
        """Run a script, if anybody answers."""
        if self.away:
            raise lost()
        name = script.text.partition(".lua")[0].removeprefix("-- ")
        self.before(name)
        reply = super().run(script, keys, *arguments)
        self.after(name)
        return reply


def lost(*_: Any) -> StoreError:
    """Make the error of a server that did not answer."""
    return StoreError("redis://nowhere", "away")


class Shop:
    """
    An app with one lock server, whose processes are all this one.

    Args:
        url: A lock server to use instead of one in this process.
        conf: Settings of the app.

    Attributes:
        app: The app; its tasks are those that :meth:`declare` makes.
        server: The lock server.
        ran: The ids of the tasks whose bodies began, in order.
    """

    def __init__(self, url: str = "", **conf: Any) -> None:
        self.server = Server()
        self.url = url
        self.conf = conf
        self.ran: list[str] = []
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        if not self.url:
            serve = mock.patch.object(store_module, "server_for", lambda *_, **__: self.server)
            self._undo.enter_context(serve)
        unthreaded = partial(Watchdog, threaded=False)
        self._undo.enter_context(mock.patch.object(Process, "watchdog_type", unthreaded))
        cache._DUMMY_CLIENT_CACHE.clear()  # else results outlive their app
        self.app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
        self.app.conf.update(
            dislock_url=self.url or "redis://nowhere",
            task_default_queue=f"shop-{next(_numbers)}",
            **self.conf,
        )
        self.dislock = Dislock(self.app)
        self.messages = Messages([self.app], lambda: self.server.now_ms / 1000 - START)
        self._undo.enter_context(self.messages)
        return self

    def __exit__(self, *_failure: object) -> None:
        self._undo.close()

    def declare(
        self,
        body: Callable[[Any], object] = bool,
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
        options = {"base": SingletonTask, "lock_key": "k", **options}
        self.app.tasks.pop(name, None)

        @self.app.task(
            name=name, bind=True, shared=False, lock_on_conflict=lock_on_conflict, **options
        )
        def export(task: Any, *args: Any) -> object:
            self.ran.append(task.request.id)
            return body(task)

        self.app.finalize()
        return self.app.tasks[name]

    def send(self, task: Any, task_id: str, *args: Any, notes: Any = None, **options: Any) -> Any:
        """Send a task of this id; *notes* are added to our header."""
        headers = {**options.pop("headers", {})}
        if notes:
            headers[HEADER] = {"v": 1, **notes}
        return task.apply_async(args, task_id=task_id, headers=headers, **options)

    def work(self) -> int:
        """Run the messages that are due, as a worker does; return how many there were."""
        return self.messages.run()

    def run(self, task: Any, task_id: str, *args: Any, **options: Any) -> Any:
        """Send a task and run all messages; return its result."""
        result = self.send(task, task_id, *args, **options)
        self.work()
        return result

    @contextmanager
    def held(self, key: str = "k", **options: Any) -> Iterator[Any]:
        """Have a lock held; its release gives the turns."""
        with self.dislock.lock(key, **options) as lease:
            yield lease

    def line(self, key: str = "k") -> list[str]:
        """Return the ids of the tasks in line."""
        return [str(one.id) for one in self.dislock.lock_of(key).line(10**6) if one.parked]

    def waiting(self) -> list[dict[str, Any]]:
        """Return the notes of the messages in the app's queue, in order; they stay there."""
        with self.app.connection_for_read() as connection:
            queue = connection.default_channel._queue_for(self.app.conf.task_default_queue).queue
            return [message["headers"].get(HEADER, {}) for message in queue]

    def sweeper(self, worker: str = "w1@here", **options: Any) -> Sweep:
        """Return the sweep of one worker."""
        process = runtime_of(self.app).new_process()
        return Sweep(process, process.sweep_name, worker, 10.0, **options)

    def sweep(self) -> None:
        """Let a worker look through the lines once."""
        sweep = self.sweeper()
        sweep.step()
        sweep.end()
