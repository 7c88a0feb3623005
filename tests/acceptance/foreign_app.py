"""A worker of somebody else, on the same broker: it has no tasks, and has not heard of locks.

Where this package is installed, Celery's command line imports it, and each worker looks after what
arrives for parked tasks.  This one is a worker of an environment without the package.
"""

from __future__ import annotations

import os

from celery import Celery

URL = os.environ.get("SCENARIOS_URL", "redis://localhost:6379/0")
app = Celery("foreign", broker=os.environ.get("SCENARIOS_BROKER_URL", URL), backend=URL)


@app.on_after_finalize.connect
def _without_locks(sender: Celery, **_kwargs: object) -> None:
    for steps in sender.steps.values():
        steps.difference_update({step for step in steps if "dislock" in str(step)})
