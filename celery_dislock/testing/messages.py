"""The messages of a test, which are run as a worker runs them, in the test's thread.

A worker judges an ETA and an expiry by the clock of its machine.  Here this is Python's, and the
seconds by which the test has moved time since the message was sent.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

from celery.app.control import Control
from celery.concurrency.base import BasePool, apply_target
from celery.signals import before_task_publish
from celery.utils.functional import maybe_list
from celery.worker import state
from celery.worker.strategy import hybrid_to_proto2
from kombu.utils.imports import symbol_by_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from celery import Celery
    from kombu.message import Message
    from typing_extensions import Self

ROUNDS_MOST = 1000  # times that the queues are looked into; a line of tasks needs one each
WORKER = "celery@test"  # what runs messages in the test's thread


class Waiting(NamedTuple):
    """
    A message that was taken from its queue.

    Attributes:
        due: When it is run, as UNIX time and the seconds by which time has been moved.
        app: The app whose queue it was in.
        message: The message.
        read: What a worker's request takes of it: its headers, and perhaps its body.
    """

    due: float
    app: Celery
    message: Message
    read: dict[str, Any]

    @property
    def headers(self) -> dict[str, Any]:
        """The headers, wherever the message has them."""
        found: dict[str, Any] = self.read["headers"]
        return found


class Messages:
    """
    The messages in the queues of some apps.  A context manager.

    Args:
        apps: The apps, which may become more.
        moved: Returns the seconds by which the test has moved time.
    """

    def __init__(self, apps: Sequence[Celery], moved: Callable[[], float]) -> None:
        self._apps = apps
        self._moved = moved
        # How far time had been moved when a message was sent, by its id and an ETA or expiry.
        self._sent: dict[tuple[Any, Any], float] = {}
        self._channels: dict[Celery, Any] = {}
        self._waiting: list[Waiting] = []
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        before_task_publish.connect(self._note, weak=False)
        self._undo.callback(before_task_publish.disconnect, self._note)
        original = Control.broadcast

        def broadcast(control: Control, command: str, *args: Any, **options: Any) -> Any:
            if control.app in self._apps and command == "revoke":  # as a worker hears it
                told = args[0] if args else options["arguments"]
                state.revoked.update(map(str, maybe_list(told["task_id"]) or ()))
            return original(control, command, *args, **options)

        self._undo.enter_context(mock.patch.object(Control, "broadcast", broadcast))
        self._undo.callback(partial(_forget_others_than, set(state.revoked)))
        return self

    def __exit__(self, *_failure: object) -> None:
        self._undo.close()

    def _note(self, headers: dict[str, Any], body: Any, **_kwargs: Any) -> None:
        moved = self._moved()
        told = body if isinstance(body, dict) else headers  # in message protocol 1 the body has it
        self._sent.update(((told.get("id"), told[n]), moved) for n in TIMES if told.get(n))

    def run(self) -> int:
        """
        Run the messages that wait and are due; return how many there were.

        Raises:
            AssertionError: Messages keep coming.
        """
        ran = 0
        for _ in range(ROUNDS_MOST):
            if not (due := self._due()):
                return ran
            for waiting in due:
                self._run(waiting)
            ran += len(due)
        about = due[-1].headers
        raise AssertionError(
            f"run_parked() has run {ran} messages, and there are still more: does one put itself "
            f"back for ever? The last was task {about['task']}[{about['id']}]"
        )

    def _due(self) -> list[Waiting]:
        for app in self._apps:
            channel = self._channels.get(app)
            if channel is None:
                connection = self._undo.enter_context(app.connection_for_read())
                channel = self._channels[app] = connection.default_channel
            for queue in queues(app):
                while message := queue(channel).get():
                    read = _read(message)
                    due = self._when(read["headers"], "eta")
                    self._waiting.append(Waiting(due, app, message, read))
        now = time.time() + self._moved()
        due_now = [waiting for waiting in self._waiting if waiting.due <= now]
        self._waiting = [waiting for waiting in self._waiting if waiting.due > now]
        return due_now

    def _when(self, headers: dict[str, Any], name: str) -> float:
        """Return an ETA or expiry of a message, as UNIX time and what time has been moved by."""
        told = headers.get(name)
        if not told:
            return 0.0
        # Of a message that another process has sent: when it was taken from its queue.
        moved = self._sent.setdefault((headers["id"], told), self._moved())
        return datetime.fromisoformat(told).timestamp() + moved

    def _run(self, waiting: Waiting) -> None:
        message, name = waiting.message, waiting.headers["task"]
        app = next((app for app in self._apps if name in app.tasks), waiting.app)
        expires = self._when(waiting.headers, "expires")
        if expires and expires < time.time() + self._moved():
            waiting.headers["expires"] = datetime.fromtimestamp(0, timezone.utc).isoformat()
        task = app.tasks[name]
        request = symbol_by_name(task.Request)(
            message,
            app=app,
            task=task,
            hostname=WORKER,
            on_ack=message.ack_log_error,
            on_reject=message.reject_log_error,
            **waiting.read,
        )
        if not request.revoked():
            request.execute_using_pool(InThread(app=app))


TIMES = ("eta", "expires")  # headers


def _read(message: Message) -> dict[str, Any]:
    """Return what a worker's request takes of a message; see :class:`Waiting`."""
    if "task" in message.headers:
        return {"headers": message.headers}
    body, headers, decoded, utc = hybrid_to_proto2(message, message.decode())
    return {"headers": headers, "body": body, "decoded": decoded, "utc": utc}


def queues(app: Celery) -> list[Any]:
    """Return the queues that the app knows; a worker may choose some of them."""
    return [*app.amqp.queues.values()]


def _forget_others_than(known: set[str]) -> None:
    for task_id in set(state.revoked) - known:
        state.revoked.discard(task_id)


class InThread(BasePool):  # type: ignore[misc]
    """A pool that runs a task at once, in the thread that has the message."""

    def on_apply(self, target: Any, args: Any, kwargs: Any, **options: Any) -> None:
        """Run it, and then do to the message what a worker does: acknowledge, reject, requeue."""
        kwargs = {**kwargs, "app": self.app}  # or it is the current one
        apply_target(target, args, kwargs, propagate=BaseException, **options)  # pytest's, too
