"""
Workers of a simulation: Celery's own tracer and requests, and the real guard, without a broker.

Each process has an app.  What it publishes goes into the queue of the history, and a result into a
dictionary; its lock server is simulated, and so is the time.
"""

from __future__ import annotations

import json
import logging
import random
from collections import defaultdict
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from celery import Celery
from celery.app.trace import build_tracer
from celery.backends.base import KeyValueStoreBackend
from kombu.message import Message
from kombu.utils.imports import symbol_by_name

from celery_dislock import Key, SingletonTask
from celery_dislock.config.settings import AppSettings
from celery_dislock.locks import interruption
from celery_dislock.locks.runtime import Runtime
from celery_dislock.messages import headers as message_headers
from celery_dislock.messages import message as messages
from celery_dislock.messages import unrun
from celery_dislock.messages.headers import TICKET, notes_in
from celery_dislock.parking import epoch, publisher, store
from celery_dislock.parking.process import ParkingProcess
from celery_dislock.scripts.names import sweep_lock
from celery_dislock.tasks import acquisition, conflicts, guard, request, sending
from celery_dislock.worker import stalled
from proof.simulated import Interrupted, Net, Process, Wait, sleep_in, stop_if_actor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from celery_dislock.servers.replies import Turn

WIDE = "c"  # the key that tasks of several keys share
OTHER = "other_"  # before the name of an option: what the other release says of it
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)  # at the simulation's time 0, as on its server
BY_WALL = (conflicts, acquisition, guard, sending, unrun, message_headers)  # modules that use time


def named_by(options: Mapping[str, Any]) -> str:
    """Name a task by its options; without the quotes of JSON, as scripts look for it there."""
    return json.dumps(options, sort_keys=True).replace('"', "'")


def options_of(name: str) -> Any:
    """Return the options by which a task is named."""
    return json.loads(name.replace("'", '"'))


@dataclass(eq=False)
class Copy:
    """A message in the broker, as it was published."""

    headers: dict[str, Any]
    body: bytes
    broker: str  # the broker that has it
    due: float = 0.0
    redelivered: bool = False

    @property
    def task(self) -> str:
        """The task's id."""
        return str(self.headers["id"])

    @property
    def marked(self) -> bool:
        """Whether it is the message of a turn."""
        return TICKET in notes_in(self.headers)


class Results(KeyValueStoreBackend):  # type: ignore[misc]
    """Keeps results, and tells of their states."""

    told: Callable[[str, str, Any], None]

    def __init__(self, app: Celery) -> None:
        super().__init__(app=app)
        self.kept: dict[Any, Any] = {}

    def get(self, key: Any) -> Any:
        """Return a result."""
        return self.kept.get(key)

    def set(self, key: Any, value: Any) -> None:
        """Keep a result."""
        self.kept[key] = value

    def store_result(self, task_id: str, result: Any, state: str, **kwargs: Any) -> Any:
        """Tell of the state, and keep the result."""
        self.told(task_id, state, result)
        return super().store_result(task_id, result, state, **kwargs)


class WorkerProcess(ParkingProcess):
    """The locks of a simulated process."""

    def hand_over(self, turns: Sequence[Turn]) -> None:
        """Publish parked tasks."""
        self._hand_over(turns)


class WorkerRuntime(Runtime[Any]):
    """Gives an app the simulated process that it runs in."""

    inside: Process

    @property
    def process(self) -> Any:
        """What the guard takes for its process."""
        return self.inside.parking

    def lock(self, *of: Any, **how: Any) -> Any:
        """Make a lock under the driven clock."""
        return self.inside.lock(*of, **how)


class Worker:
    """
    The app of simulated processes, of one after the other: to make an app takes long.

    Args:
        is_other: It has the other release of the tasks.
    """

    def __init__(self, *, is_other: bool = False) -> None:
        self.is_other = is_other
        app: Any = Celery("simulated", broker="memory://", set_as_current=False)
        self.app = app
        app.conf.dislock_url = "redis://nowhere"
        self.runtime = WorkerRuntime(lambda: app.conf)
        app.__dict__["_dislock_runtime"] = self.runtime
        self.results = Results(app)
        app._get_backend = lambda: self.results  # noqa: SLF001 -- it is asked for by name elsewhere
        app.amqp.send_task_message = self._send
        app.producer_or_acquire = self._acquired
        app.__dict__["_dislock_producers"] = defaultdict(lambda: self)
        mailbox = SimpleNamespace(_publish=self._broadcast)
        app.__dict__["control"] = SimpleNamespace(mailbox=lambda _connection: mailbox)
        app.now = lambda: EPOCH + timedelta(seconds=self.net.time)
        self.channel = None
        self.connection = SimpleNamespace(
            transport=SimpleNamespace(driver_type="amqp"), _reraise_as_library_errors=nullcontext
        )

    def begin(
        self,
        process: Process,
        enqueue: Callable[[Copy], None],
        told: Callable[[str, str, Any], None],
        commands: Callable[[str, str], None],
        body: Callable[[Any], None],
    ) -> None:
        """
        Be the app of a process that has just begun.

        Args:
            process: The process.
            enqueue: Called with each message that is published.
            told: Called with a task's id, each of its states, and what is stored with it.
            commands: Called with a worker's name and the id of a task that it is to look at.
            body: The body of all tasks, called with the task.
        """
        self.net, self.broker, self.enqueue, self.body = process.net, process.broker, enqueue, body
        self.commands = commands
        self.results.told = told
        self.runtime.inside = process
        process.parking = parking = WorkerProcess(self.app.conf, AppSettings(), self.app)
        parking.store = parking.loop_store = parking.__dict__["quick_store"] = process.store
        parking.lines = parking.publisher.lines = process.lines
        parking.sweep_name = sweep_lock(parking.settings.dislock_prefix, process.broker)
        parking.watchdog = process.watchdog
        parking.channel = process.channel
        vars(parking).update(pid=process.number, owner_name=process.owner_name)
        self.app.__dict__["_dislock_sender"] = sending.Sender(
            self.app,
            self.runtime,
            clock=process.net.clock,
            pause=sleep_in(process.net),
        )

    def task(self, name: str) -> Any:
        """Return a task; its name has its options."""
        if name not in self.app.tasks:

            def run(task: Any, key: str, wide: str = WIDE) -> None:  # noqa: ARG001 -- name locks
                self.body(task)

            declared = {"lock_key": "<key>", **options_of(name)}
            for option in [option for option in declared if option.startswith(OTHER)]:
                other = declared.pop(option)
                if self.is_other:
                    declared[option.removeprefix(OTHER)] = other
            keys = declared["lock_key"]
            if isinstance(keys, list):
                declared["lock_key"] = [
                    Key(**one) if isinstance(one, dict) else one for one in keys
                ]
            self.app.task(name=name, base=SingletonTask, shared=False, bind=True, **declared)(run)

        return self.app.tasks[name]

    def received(self, copy: Copy) -> Any:
        """Make the worker's request of a message."""
        task = self.task(copy.headers["task"])
        message = Message(
            body=copy.body,
            content_type="application/json",
            content_encoding="utf-8",
            headers=json.loads(json.dumps(copy.headers)),
            properties={"correlation_id": copy.task, "delivery_tag": f"{id(copy)}"},
            delivery_info={
                "exchange": "", "routing_key": "celery", "redelivered": copy.redelivered,
            },
        )  # fmt: skip
        made = symbol_by_name(task.Request)(
            message, app=self.app, task=task, hostname=self.runtime.inside.name
        )
        made.worker_pid = self.runtime.inside.number
        return made

    def run(self, made: Any) -> Any:
        """Run a task as a pool process does; returns its result, or the error that ended it."""
        tracer = build_tracer(made.task.name, made.task, app=self.app)
        ended = tracer(made.id, made.args, made.kwargs, made.request_dict).retval
        ended = getattr(ended, "exception", ended)
        return getattr(ended, "exc", ended)

    def _broadcast(
        self, _command: str, about: dict[str, str], *, destination: Sequence[str], **_: Any
    ) -> None:
        """Tell workers by remote control to look at a task."""
        stop_if_actor(Wait())
        for worker in destination:
            self.commands(worker, about["task_id"])

    @contextmanager
    def _acquired(self, *_: Any) -> Iterator[Worker]:
        """Stand for producer_or_acquire."""
        yield self

    def send(self, publish: Callable[[Any], Any]) -> Any:
        """Stand for the producers of a process of this package's own."""
        return publish(self)

    def publish(self, body: bytes, *, headers: dict[str, Any], **_: Any) -> None:
        """Publish a message again, as kombu's producer does; the process may die before."""
        stop_if_actor(Wait())
        self.enqueue(Copy(headers, body, self.broker, due(headers)))

    def _send(
        self,
        _producer: Any,
        _name: str,
        message: Any,
        *,
        headers: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Publish a message of a task."""
        stop_if_actor(Wait())
        headers = {**message.headers, **(headers or {})}
        self.enqueue(Copy(headers, json.dumps(message.body).encode(), self.broker, due(headers)))


def due(headers: dict[str, Any]) -> float:
    """Return the simulation's time of a message's ETA; 0 if it has none."""
    eta = headers.get("eta")
    return 0.0 if eta is None else (datetime.fromisoformat(eta) - EPOCH).total_seconds()


@contextmanager
def driven(net: Net, seed: str) -> Iterator[None]:
    """Let the real client use the simulation's time, and chance that can be repeated."""
    rng, numbers = random.Random(f"{seed} client"), count(1)
    clock = SimpleNamespace(
        time=lambda: EPOCH.timestamp() + net.time, monotonic=net.clock, sleep=sleep_in(net)
    )
    logging.disable(logging.CRITICAL)
    with ExitStack() as stack:
        for module in BY_WALL:
            stack.enter_context(patch.object(module, "time", clock))
        for module, name, value in (
            (unrun, "random", rng),
            (interruption, "running_here", Interrupted),
            (sending, "token_hex", lambda _: f"{next(numbers):016x}"),
            (epoch, "token_hex", lambda _: f"{next(numbers):032x}"),
            (store, "token_hex", lambda _: f"{next(numbers):016x}"),
            (request, "is_child", lambda pid: pid is not None),
            (request, "is_alive", lambda _: False),
            (stalled, "is_child", lambda pid: pid is not None),
            (stalled, "is_alive", lambda _: True),
            (publisher, "answer_within", lambda _, ask: ask()),  # not in a thread
            (messages, "answer_within", lambda _, ask: ask()),
        ):
            stack.enter_context(patch.object(module, name, value))
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
