"""A worker of somebody else, on the same broker: it has no tasks, and has not heard of locks."""

from __future__ import annotations

import os

from celery import Celery

URL = os.environ.get("SCENARIOS_URL", "redis://localhost:6379/0")
app = Celery("foreign", broker=os.environ.get("SCENARIOS_BROKER_URL", URL), backend=URL)
