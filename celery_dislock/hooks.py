"""What this package wraps of Celery's: the only place that does so.

A sender may make no ``Dislock``, and several threads may use a task for the first time at once.
So what decides about messages is wrapped for all apps, once, when the package is imported, and not
when an app or a task is made.  The same goes for what hides passwords in Celery's reports.
"""

from __future__ import annotations

import inspect
import sys
from functools import cache, partial, wraps
from typing import TYPE_CHECKING, Any

from celery import Celery
from celery.app import utils
from celery.result import AsyncResult
from celery.utils.functional import maybe_list

from celery_dislock.config.settings import reported
from celery_dislock.tasks.sending import send, sender_of, tell
from celery_dislock.tasks.task import guard_for_sending

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from celery import Task
    from celery.app.control import Control
    from celery.worker.consumer import Consumer
    from celery.worker.request import Request


def _sending_uniquely() -> None:
    """Wrap ``Celery.send_task``, through which all messages of tasks go."""
    original = Celery.send_task
    positional = list(inspect.signature(original).parameters)[4:]

    @wraps(original)
    def send_task(
        self: Celery, name: str, args: Any = None, kwargs: Any = None, *more: Any, **options: Any
    ) -> Any:
        options.update(zip(positional, more, strict=False))
        publish = partial(original, self, name, args, kwargs)
        task = options.get("task_type") or _task_named(self, name)
        guard = None if task is None else guard_for_sending(task, self)
        if guard is None:
            return publish(**options)
        return send(self, task, guard, args, kwargs, options, publish)

    Celery.send_task = send_task


def _task_named(app: Celery, name: str) -> Task | None:
    """Return a task that this process knows; those of ``@app.task`` are made at their first use."""
    tasks = app._tasks  # noqa: SLF001 -- app.tasks makes them all
    if name not in tasks and app._pending and app.autofinalize and not app.finalized:  # noqa: SLF001
        tasks = app.tasks
    return tasks.get(name)


def _controlling() -> None:
    """Wrap revokes as soon as an app is asked for its ``control``, whose import takes long."""
    descriptor = Celery.__dict__["control"]
    original = descriptor.func

    @wraps(original)
    def control(self: Celery) -> Any:
        _revoking()
        return original(self)

    descriptor.func = control
    if "celery.app.control" in sys.modules:
        _revoking()


@cache
def _revoking() -> None:
    """Wrap revokes in the process that sends one."""
    from celery.app.control import Control  # noqa: PLC0415 -- see above

    original = Control.revoke

    @wraps(original)
    def revoke(self: Control, task_id: Any, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, task_id, *args, **kwargs)
        sender_of(self.app).revoked(map(str, maybe_list(task_id) or ()))
        return answer

    Control.revoke = revoke


def receive_revokes() -> None:
    """Wrap revokes in a worker that receives them; called once, by workers only."""
    from celery.worker.control import Panel  # noqa: PLC0415 -- other processes have none

    _revoking()
    received = Panel.data["revoke"]

    @wraps(received)
    def on_revoke(control: Any, task_id: Any, *args: Any, **kwargs: Any) -> Any:
        from celery.worker import state  # noqa: PLC0415 -- as above

        answer = received(control, task_id, *args, **kwargs)
        ids = set(maybe_list(task_id) or ())
        for request in [*state.reserved_requests, *_scheduled(control.consumer)]:
            if request.id in ids and request not in state.active_requests:
                tell(control.app, "end_waiting", request._context)  # noqa: SLF001
        return answer

    Panel.data["revoke"] = on_revoke


def _scheduled(consumer: Consumer) -> Iterator[Request]:
    """Return the messages that wait in a worker for their ETA: its timer alone has them."""
    from celery.worker.request import Request  # noqa: PLC0415 -- as above

    for waiting in consumer.timer.schedule.queue:
        request, *_ = waiting.entry.args or (None,)
        if isinstance(request, Request):
            yield request


def _reporting() -> None:
    """Wrap what hides passwords in ``celery report`` and ``inspect conf``."""
    original = utils.filter_hidden_settings

    @wraps(original)
    def filter_hidden_settings(conf: Mapping[Any, Any]) -> dict[Any, Any]:
        told: dict[Any, Any] = original(
            {name: reported(str(name), value) for name, value in conf.items()}
        )
        return told

    utils.filter_hidden_settings = filter_hidden_settings


_sending_uniquely()
_controlling()
_reporting()
AsyncResult.duplicate = False  # so that a caller can always ask whether a result is another's
