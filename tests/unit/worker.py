"""What a worker does with a message, and a broker that is not there."""

from __future__ import annotations

from typing import Any

from celery.app.trace import build_tracer
from kombu.exceptions import OperationalError


def deliver(task: Any, task_id: str = "1", *args: Any, **request: Any) -> Any:
    """Run the task as a worker does: traced, not eager."""
    tracer = build_tracer(task.name, task, app=task.app)
    headers = {"id": task_id, "task": task.name, "hostname": "w1", "retries": 0, **request}
    return tracer(task_id, args, {}, headers)


class Broker:
    """
    Stands for send_task.

    Attributes:
        times_away: How many calls fail yet.
        sent: Options of what was sent, in order.
    """

    def __init__(self, times_away: int = 0) -> None:
        self.times_away = times_away
        self.sent: list[dict[str, Any]] = []

    def __call__(self, name: str, *_: Any, **options: Any) -> None:
        if self.times_away:
            self.times_away -= 1
            raise OperationalError
        self.sent.append({"name": name, **options})
