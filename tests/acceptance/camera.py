"""A camera for ``celery events``: what a monitor makes of the workers' events, in Redis."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import redis
from celery.events.snapshot import Polaroid

if TYPE_CHECKING:
    from celery.events.state import State

SEEN = "seen-by-the-camera"  # hash: task id -> state and reason, in JSON
SHUTTERS = "shutters-of-the-camera"  # how many pictures were taken


class Camera(Polaroid):
    """Writes down each task that it sees."""

    def on_shutter(self, state: State) -> None:
        client = redis.Redis.from_url(os.environ["SCENARIOS_URL"])
        for task_id, task in state.tasks.items():
            about = {"state": task.state, "reason": getattr(task, "reason", None)}
            client.hset(SEEN, task_id, json.dumps(about))
        client.incr(SHUTTERS)
